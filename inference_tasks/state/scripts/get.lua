-- Reads records.
-- KEYS     one task record each
-- ARGV     the names of the wanted fields
-- Returns  one line per key, apart by \30, its fields by \31 (empty where there is none), and at its end the ids of the
--          tasks that it waits for, apart by \29; an empty line for no record
-- Atomic over the whole batch; changes nothing. One string is read several times faster by a client than many.

local lines = {}
for i = 1, #KEYS do
  local record = redis.call('HMGET', KEYS[i], unpack(ARGV))
  if record[1] then
    for j = 1, #record do record[j] = record[j] or '' end
    local needs = record[1] == 'waiting' and redis.call('SMEMBERS', beside(KEYS[i], 'needs')) or {}
    record[#record + 1] = table.concat(needs, '\29')
    lines[i] = table.concat(record, FIELD)
  else
    lines[i] = ''
  end
end
return table.concat(lines, RECORD)
