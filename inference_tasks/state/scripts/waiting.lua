-- Counts the tasks that wait in queues, those still parked left out.
-- KEYS     the queues' indices
-- ARGV     none
-- Returns  for each queue: how many, since when the oldest (unix seconds, empty if none), as one list
-- Atomic over all queues; changes nothing.

local now = moment((clock()))
local found = {}
for i = 1, #KEYS do
  local number = redis.call('ZCOUNT', KEYS[i], '-inf', now)
  found[2 * i - 1] = number
  found[2 * i] = number > 0 and redis.call('ZRANGE', KEYS[i], 0, 0, 'WITHSCORES')[2] or ''
end
return found
