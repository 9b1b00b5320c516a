-- Sets or takes away what an operator has switched off, and notes it in the operator log.
-- KEYS     the switches, the operator log
-- ARGV     target; action, empty to take the switch away; by whom; why; how many lines the log keeps
-- Returns  the switch that the target had (JSON), empty if none
-- Atomic. Taking away what is not there is not noted.

local before = redis.call('HGET', KEYS[1], ARGV[1]) or ''
local action = ARGV[2]
if action == '' then
  if before == '' then return '' end
  redis.call('HDEL', KEYS[1], ARGV[1])
  action = 'resume'
else
  redis.call('HSET', KEYS[1], ARGV[1],
    cjson.encode({ action = action, by = ARGV[3], at_s = moment((clock())), because = ARGV[4] }))
end
note_operator(KEYS[2], action, ARGV[1], ARGV[3], ARGV[4], ARGV[5])
return before
