-- Reads all switches.
-- KEYS     the switches
-- ARGV     none
-- Returns  target, switch (JSON), target, … as a list
-- Changes nothing.

return redis.call('HGETALL', KEYS[1])
