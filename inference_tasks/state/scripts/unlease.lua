-- Gives a lease back.
-- KEYS     the lease
-- ARGV[1]  who gives it back
-- Returns  nothing
-- Atomic; the lease of another is not touched.

if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
