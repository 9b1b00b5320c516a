-- Leases tasks to a worker before they start, or says why they must not start.
-- KEYS     two per task: its record, its Celery result
-- ARGV[1]  worker   ARGV[2] lease, seconds   ARGV[3] lifetime of an unfinished, ARGV[4] of a finished record, seconds
-- ARGV[5]  default crash limit
-- ARGV[6…] one per task, fields apart by \31: id, name, tier, tier_first, lane, generation, submitted_at_s,
--          expires_at_s, crash_limit (the last three may be empty)
-- Returns  one answer per task, apart by \30, its fields by \31: verdict, token, attempts, held_until_s, tier_first,
--          wait_s, worker (empty where there is nothing to say)
-- Atomic over the whole batch; of two messages of one task in a batch the second finds the first's claim. A missing
-- record is made from the message. A claim over an ended lease counts a crash. token = max(previous + 1, server time
-- in microseconds), so it grows even when Redis has forgotten the previous one.

local now, now_us = clock()
local worker, lease_s, unfinished_ttl_s, finished_ttl_s = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local held_until = moment(now + lease_s)
local now_text = moment(now)
local answers = {}

local function claim(key, result_key, text)
  local id, name, tier, tier_first, lane, generation_text, submitted, expires, crash_limit = string.match(text,
    '^([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)$')
  local generation = tonumber(generation_text)
  local record = redis.call('HMGET', key, 'state', 'generation', 'token', 'attempts', 'crashes', 'held_until_s',
    'tier_first', 'submitted_at_s', 'expires_at_s', 'worker', 'tier', 'lane')
  local state = record[1]
  if not state then
    state = 'pending'
    record = { state, generation_text, false, false, false, false, tier_first, submitted, expires, false, tier, lane }
    redis.call('HSET', key, 'name', name, 'tier', tier, 'tier_first', tier_first, 'lane', lane,
      'generation', generation_text, 'submitted_at_s', submitted, 'expires_at_s', expires)
  end
  local known_generation = tonumber(record[2]) or 0
  local token = tonumber(record[3]) or 0
  local attempts = tonumber(record[4]) or 0
  local crashes = tonumber(record[5]) or 0
  local first = record[7] or tier_first

  local function answer(verdict, until_s, wait, holder)
    return table.concat({ verdict, whole(token), attempts, until_s or '', first, wait or '', holder or '' }, FIELD)
  end

  local is_new_life = generation > known_generation
  if generation < known_generation then return answer('superseded') end
  if END[state] and not (is_new_life and state == 'failed') then
    return answer((state == 'cancelled' or state == 'expired') and state or 'finished')
  end
  if state == 'processing' and (tonumber(record[6]) or 0) > now then
    return answer('held', record[6], nil, record[10])
  end

  if is_new_life then
    -- The mark of a replay is missing (Redis lost it, or it comes later): the message decides, limits start anew.
    crashes = 0
    redis.call('HSET', key, 'generation', generation_text, 'failures', 0, 'crashes', 0)
    redis.call('HDEL', key, 'finished_at_s', 'error_type', 'error_message')
    redis.call('DEL', result_key)
  elseif state == 'processing' then
    crashes = crashes + 1
    if crashes >= (tonumber(crash_limit) or tonumber(ARGV[5])) then
      fail_crashed(key, result_key, finished_ttl_s, id, crashes, now)
      return answer('crashed')
    end
    redis.call('HSET', key, 'crashes', crashes)
  end

  local deadline = tonumber(record[9] or '')
  if deadline and deadline <= now then
    redis.call('HSET', key, 'state', 'expired', 'finished_at_s', now_text)
    redis.call('HDEL', key, 'held_until_s')
    redis.call('EXPIRE', key, finished_ttl_s)
    announce(result_key, finished_ttl_s, id, 'REVOKED', 'celery.exceptions', 'TaskRevokedError', 'expired')
    return answer('expired')
  end

  token = math.max(token + 1, now_us)
  attempts = attempts + 1
  redis.call('HSET', key, 'state', 'processing', 'token', whole(token), 'attempts', attempts, 'worker', worker,
    'held_until_s', held_until, 'started_at_s', now_text)
  if record[11] ~= tier or record[12] ~= lane then redis.call('HSET', key, 'tier', tier, 'lane', lane) end
  if crash_limit ~= '' then redis.call('HSET', key, 'crash_limit', crash_limit) end
  redis.call('EXPIRE', key, unfinished_ttl_s)
  local since = attempts == 1 and tonumber(record[8] or '')
  return answer('run', held_until, since and moment(math.max(0, now - since)))
end

for i = 1, #KEYS / 2 do
  answers[i] = claim(KEYS[2 * i - 1], KEYS[2 * i], ARGV[5 + i])
end
return table.concat(answers, RECORD)
