-- Forgets a worker that ends on purpose.
-- KEYS     the live workers, this worker's heartbeat
-- ARGV[1]  worker
-- Returns  nothing
-- Atomic.

redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2])
