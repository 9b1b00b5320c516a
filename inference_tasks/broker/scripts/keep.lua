-- What every living worker does a few times a second, for itself and for all: renews its own lease, returns what dead
-- consumers held, and moves delayed messages that are due into their queues.
-- ARGV[1]  the consumer
-- ARGV[2]  its lease in seconds; 0 ends it and returns at once what it still holds
-- ARGV[3]  most messages to move in one call, so that no call takes long
-- Returns  messages returned, messages due, milliseconds until the next is due (-1: none)
-- Atomic.

local moment, limit = now(), tonumber(ARGV[3])
redis.call('ZADD', CONSUMERS, moment + ARGV[2], ARGV[1])
local returned, rings = 0, {}
for _, consumer in ipairs(redis.call('ZRANGEBYSCORE', CONSUMERS, '-inf', moment, 'LIMIT', 0, limit)) do
  local all = redis.call('HGETALL', held_key(consumer))
  for i = 1, #all, 2 do
    local queue, message = split(all[i + 1])
    put_back(queue, all[i], message)
    rings[queue] = true
    returned = returned + 1
  end
  redis.call('DEL', held_key(consumer))
  redis.call('ZREM', CONSUMERS, consumer)
  if returned >= limit then break end
end
local due = redis.call('ZRANGEBYSCORE', DELAYED, '-inf', moment, 'LIMIT', 0, limit)
for _, entry in ipairs(due) do
  local _, rest = split(entry)
  local queue, message = split(rest)
  redis.call('LPUSH', queue, message)
  redis.call('ZREM', DELAYED, entry)
  rings[queue] = true
end
for queue in pairs(rings) do ring(queue) end
local first = redis.call('ZRANGE', DELAYED, 0, 0, 'WITHSCORES')
local wait_ms = -1
if first[2] then wait_ms = math.max(0, math.ceil((first[2] - moment) * 1000)) end
return { returned, #due, wait_ms }
