-- Counts a task among those that its holder has under way, unless the holder has as many as it may have.
-- KEYS[1]  the holder's tasks: a sorted set, id by the time of its entry
-- ARGV[1]  task id   ARGV[2] how many it may have   ARGV[3] lifetime of the set after the last entry, seconds
-- Returns  1 if it was counted, 0 if there was no room
-- Atomic.

if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
redis.call('ZADD', KEYS[1], moment((clock())), ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
