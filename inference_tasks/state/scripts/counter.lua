-- Reads one count.
-- KEYS     counters
-- ARGV[1]  its name
-- Returns  the count, 0 if it has never been raised

return tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or 0)
