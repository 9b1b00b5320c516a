-- Fetches one message from each named queue, in this order, and notes who holds them.
-- ARGV[1]  the consumer
-- ARGV[2]  lease in seconds, for a consumer that has none
-- ARGV[3…] queues; one may be named several times
-- Returns  per queue tag \31 message, or nil where it is empty
-- Atomic: a message is in its queue or held, at no moment neither.

local consumer = ARGV[1]
redis.call('ZADD', CONSUMERS, 'NX', now() + ARGV[2], consumer)
local held, answers = held_key(consumer), {}
for i = 3, #ARGV do
  local queue = ARGV[i]
  local tag, message = pop(queue)
  if message then
    tag = tag or string.format('%.0f', redis.call('INCR', TAGS))
    redis.call('HSET', held, tag, queue .. FIELD .. message)
    answers[i - 2] = tag .. FIELD .. message
  else
    answers[i - 2] = false
  end
end
return answers
