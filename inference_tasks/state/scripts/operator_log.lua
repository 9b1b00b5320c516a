-- Reads the newest lines of the operator log.
-- KEYS     the operator log
-- ARGV     how many
-- Returns  lines (JSON) as a list, the newest first
-- Changes nothing.

return redis.call('LRANGE', KEYS[1], 0, ARGV[1] - 1)
