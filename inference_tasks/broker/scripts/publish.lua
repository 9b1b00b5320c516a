-- Puts messages into queues, each only if its queue has room.
-- ARGV[1]  the dead-letter queue
-- ARGV[2]  how many queues follow
-- then     for each queue: name, bound (messages, empty for none), overflow (reject-publish or drop-head)
-- then     for each message: number of its queue (from 1), delay in seconds (0 for none), the message
-- Returns  one letter per message: a accepted, r refused
-- Atomic: depth and bound are compared in the same step as the push, so a bound is never exceeded.

local dead, count = ARGV[1], tonumber(ARGV[2])
local queues = {}
for i = 1, count do
  local at = 3 * i
  queues[i] = { name = ARGV[at], bound = tonumber(ARGV[at + 1]), drops = ARGV[at + 2] == 'drop-head' }
end
local verdicts, due = {}, nil
for at = 3 * count + 3, #ARGV, 3 do
  local queue, delay_s, message = queues[tonumber(ARGV[at])], tonumber(ARGV[at + 1]), ARGV[at + 2]
  local verdict = 'a'
  if delay_s > 0 then
    due = due or now()
    redis.call('ZADD', DELAYED, due + delay_s, redis.call('INCR', TAGS) .. FIELD .. queue.name .. FIELD .. message)
  else
    if queue.bound then
      queue.depth = queue.depth or depth(queue.name)
      if queue.depth < queue.bound then
        queue.depth = queue.depth + 1
      elseif queue.drops then
        local _, oldest = pop(queue.name)
        if oldest then bury(dead, queue.name, oldest, 'maxlen') end
      else
        verdict = 'r'
      end
    end
    if verdict == 'a' then
      redis.call('LPUSH', queue.name, message)
      queue.filled = true
    end
  end
  verdicts[#verdicts + 1] = verdict
end
for i = 1, count do
  if queues[i].filled then ring(queues[i].name) end
end
return table.concat(verdicts)
