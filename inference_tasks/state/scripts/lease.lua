-- Lets one process at a time do a piece of work, or prolongs its lease.
-- KEYS     the lease
-- ARGV[1]  who wants it   ARGV[2] for how long, milliseconds
-- Returns  1 if it has it, 0 if another has
-- Atomic.

local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
