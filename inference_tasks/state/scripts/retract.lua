-- Takes back the records of one submission whose messages the broker refused.
-- KEYS     one task record each
-- ARGV[1]  nonce of the submission
-- Returns  how many records were deleted
-- Atomic over the whole batch. Only records that this submission made and that nobody has ever claimed go: a message
-- that was stored after all finds its record.

local deleted = 0
for i = 1, #KEYS do
  local record = redis.call('HMGET', KEYS[i], 'state', 'nonce', 'token')
  if record[1] == 'pending' and record[2] == ARGV[1] and not record[3] then
    deleted = deleted + redis.call('DEL', KEYS[i])
  end
end
return deleted
