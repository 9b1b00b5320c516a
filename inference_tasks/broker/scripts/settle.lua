-- Lets go of held messages without having run them.
-- ARGV[1]  the consumer
-- ARGV[2]  the dead-letter queue to move them to, or empty: back to their place in their queue
-- ARGV[3…] tags
-- Returns  how many were held; what was taken from this consumer meanwhile is left alone
-- Atomic.

local held, dead, count = held_key(ARGV[1]), ARGV[2], 0
for i = 3, #ARGV do
  local found = redis.call('HGET', held, ARGV[i])
  if found then
    local queue, message = split(found)
    redis.call('HDEL', held, ARGV[i])
    if dead ~= '' then
      bury(dead, queue, message, 'rejected')
      queue = dead
    else
      put_back(queue, ARGV[i], message)
    end
    ring(queue)
    count = count + 1
  end
end
return count
