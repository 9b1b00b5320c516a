-- Tells a run how it stands.
-- KEYS     task record
-- ARGV[1]  token of its claim
-- Returns  1 if it should stop (it was asked to, the task has ended, or another worker has it), else 0; seconds until
--          its deadline, empty for none; apart by \31. Empty for a task without a record.
-- Atomic; changes nothing.

local record = redis.call('HMGET', KEYS[1], 'state', 'token', 'cancel', 'expires_at_s')
if not record[1] then return '' end
local is_lost = END[record[1]] or (tonumber(record[2]) or 0) > tonumber(ARGV[1])
local left = record[4] and record[4] ~= '' and moment(record[4] - clock()) or ''
return ((record[3] or is_lost) and 1 or 0) .. FIELD .. left
