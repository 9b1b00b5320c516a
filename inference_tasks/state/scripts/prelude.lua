-- Read before every other script of this folder, as the first part of one chunk; never run alone.

local FIELD, RECORD = '\31', '\30'
local END = { success = true, failed = true, cancelled = true, expired = true, dropped = true }

-- Seconds and microseconds of the server's clock: no client's clock decides anything.
local function clock()
  local t = redis.call('TIME')
  return t[1] + t[2] / 1000000, t[1] * 1000000 + t[2]
end

-- tostring() keeps 14 digits, a token in microseconds has 16.
local function whole(number) return string.format('%.0f', number) end
local function moment(seconds) return string.format('%.6f', seconds) end

-- tier_first, id, name, submitted_at_s, expires_at_s, tenant: the part of a message's fields that only a missing or an ending
-- record needs, from position `from` on.
local function described(text, from)
  return string.match(text, '^([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)$', from)
end

-- Key of Celery's result document beside a record, as keys.py makes it; in the same hash slot.
local function result_key(task_key) return string.sub(task_key, 1, -5) .. 'result' end

-- mirrors Backend._get_result_meta of Celery: who waits for a result must also learn of an end no process reported.
local function announce(task_key, ttl_s, id, status, exc_module, exc_type, message)
  local meta = '{"status":"' .. status .. '","result":{"exc_type":"' .. exc_type .. '","exc_message":['
    .. cjson.encode(message) .. '],"exc_module":"' .. exc_module
    .. '"},"traceback":null,"children":[],"date_done":null,"task_id":' .. cjson.encode(id) .. '}'
  local key = result_key(task_key)
  redis.call('SET', key, meta, 'EX', ttl_s)
  redis.call('PUBLISH', key, meta)
end

-- Keys beside a record, as keys.py makes them; in the same hash slot. Holders: who holds a task that several submits
-- share, by their nonces. Needs: the tasks that it waits for. Dependents: those that wait for it. Message: its own.
local function beside(task_key, what) return string.sub(task_key, 1, -5) .. what end
local function holders_key(task_key) return beside(task_key, 'holders') end

-- What is kept beside a record only while its task has not ended; dependents.lua sees to those that wait for it.
local function clear(task_key)
  redis.call('DEL', holders_key(task_key), beside(task_key, 'needs'), beside(task_key, 'message'))
end

local function end_cancelled(task_key, ttl_s, id, now)
  redis.call('HSET', task_key, 'state', 'cancelled', 'finished_at_s', moment(now))
  redis.call('HDEL', task_key, 'held_until_s', 'due_at_s', 'error_type', 'error_message')
  redis.call('EXPIRE', task_key, ttl_s)
  clear(task_key)
  announce(task_key, ttl_s, id, 'REVOKED', 'celery.exceptions', 'TaskRevokedError', 'cancelled')
end

local function fail_crashed(task_key, ttl_s, id, crashes, now)
  local message = 'The worker process ended without a report, ' .. crashes .. ' times.'
  redis.call('HSET', task_key, 'state', 'failed', 'crashes', crashes, 'finished_at_s', moment(now),
    'error_type', 'WorkerLostError', 'error_message', message)
  redis.call('HDEL', task_key, 'held_until_s')
  redis.call('EXPIRE', task_key, ttl_s)
  clear(task_key)
  announce(task_key, ttl_s, id, 'FAILURE', 'billiard.exceptions', 'WorkerLostError', message)
end

-- Adds a line to the operator log, which keeps the newest.
local function note_operator(key, action, target, by, because, length)
  local line = { at_s = moment((clock())), by = by, action = action, target = target, because = because }
  redis.call('LPUSH', key, cjson.encode(line))
  redis.call('LTRIM', key, 0, length - 1)
end
