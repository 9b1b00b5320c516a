-- Reads the counts of all work, and of the work that is away.
-- KEYS     accounts, away
-- ARGV     none
-- Returns  two lists: the fields and values of either hash
-- Atomic; changes nothing.

return { redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2]) }
