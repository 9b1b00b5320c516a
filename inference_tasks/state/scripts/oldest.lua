-- Reads the tasks that have waited longest in a queue.
-- KEYS     the queue's index
-- ARGV[1]  unix seconds: only those ready by then; empty for now   ARGV[2] how many at most
-- Returns  id, since when (unix seconds), id, … as a list, the oldest first
-- Changes nothing.

local before = ARGV[1] ~= '' and ARGV[1] or moment((clock()))
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', before, 'WITHSCORES', 'LIMIT', 0, ARGV[2])
