-- Read before every other script of this folder, as the first part of one chunk; never run alone.
--
-- A queue is kombu's own: a list under the queue's name, new messages left, the oldest right, so that plain Celery
-- clients and monitors see it. What kombu has no safe form for lies beside it:
--   broker:held:<consumer>      hash, tag -> queue \31 message: fetched and not yet acknowledged
--   broker:put-back:<queue>     sorted set, tag -> tag \31 message: returned, to be fetched before the list, oldest first
--   broker:consumers            sorted set, consumer -> when its lease ends, unix seconds
--   broker:delayed              sorted set, number \31 queue \31 message -> when it is due, unix seconds
--   broker:tags                 counter: a tag is given at the first fetch and kept, so tags follow the queue's order
--   broker:bell:<queue>         channel: something can be fetched
-- mirrors: state/keys.py, which spells the same names. One server, no cluster: keys are not declared.

local FIELD = '\31'
local CONSUMERS, DELAYED, TAGS = 'broker:consumers', 'broker:delayed', 'broker:tags'

-- Of the server: no client's clock decides anything.
local function now()
  local t = redis.call('TIME')
  return t[1] + t[2] / 1000000
end

local function held_key(consumer) return 'broker:held:' .. consumer end
local function put_back_key(queue) return 'broker:put-back:' .. queue end
local function ring(queue) redis.call('PUBLISH', 'broker:bell:' .. queue, '') end

-- First field and the rest.
local function split(text)
  local cut = string.find(text, FIELD, 1, true)
  return string.sub(text, 1, cut - 1), string.sub(text, cut + 1)
end

-- Takes the oldest message of a queue: tag (nil if it was never fetched) and message, or nil.
local function pop(queue)
  local returned = redis.call('ZPOPMIN', put_back_key(queue))[1]
  if returned then return split(returned) end
  return nil, redis.call('RPOP', queue) or nil
end

local function depth(queue)
  return redis.call('LLEN', queue) + redis.call('ZCARD', put_back_key(queue))
end

local function put_back(queue, tag, message)
  redis.call('ZADD', put_back_key(queue), tag, tag .. FIELD .. message)
end

-- To the dead letters, with the two headers that RabbitMQ adds. By text, since decoding and encoding would turn empty
-- lists into tables; a message written by somebody else goes without them.
local OURS = '{"headers": {'
local function bury(dead, queue, message, reason)
  if string.sub(message, 1, #OURS) == OURS then
    message = OURS .. '"x-first-death-reason": "' .. reason .. '", "x-first-death-queue": ' .. cjson.encode(queue)
      .. ', ' .. string.sub(message, #OURS + 1)
  end
  redis.call('LPUSH', dead, message)
end
