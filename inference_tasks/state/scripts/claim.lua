-- Leases tasks to a worker before they start, or says why they must not start.
-- KEYS     one task record each; the Celery result beside it is written only where a task ends here
-- ARGV[1]  worker   ARGV[2] lease, seconds   ARGV[3] lifetime of an unfinished, ARGV[4] of a finished record, seconds
-- ARGV[5]  default crash limit
-- ARGV[6…] one per task, fields apart by \31: generation, tier, lane, crash_limit, tier_first, id, name,
--          submitted_at_s, expires_at_s (crash_limit and the last two may be empty)
-- Returns  server time, end of the new leases (unix seconds) and their token, apart by \31, then one answer per task,
--          each after a \30:
--            run, attempts, tier_first, submitted_at_s of a first attempt (else empty), token if it is not the common one
--            any other verdict, attempts, tier_first, token, held_until_s, worker (both empty unless held)
-- Atomic over the whole batch; of two messages of one task in a batch the second finds the first's claim. A missing
-- record is made from the message. A claim over an ended lease counts a crash. token = max(previous + 1, server time
-- in microseconds), so it grows even when Redis has forgotten the previous one.

local now, now_us = clock()
local worker = ARGV[1]
local held_until, now_text, common_token = moment(now + ARGV[2]), moment(now), whole(now_us)
local default_limit = tonumber(ARGV[5])
local call, match, number = redis.call, string.match, tonumber

local function refuse(key, verdict, attempts, tier_first, token)
  local holder, held = '', ''
  if verdict == 'held' then
    local found = call('HMGET', key, 'worker', 'held_until_s')
    holder, held = found[1] or '', found[2]
  end
  return table.concat({ verdict, attempts or 0, tier_first, token or 0, held, holder }, FIELD)
end

local function claim(key, text)
  local generation_text, tier, lane, crash_limit, rest = match(text,
    '^([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31()')
  local record = call('HMGET', key, 'state', 'generation', 'token', 'attempts', 'held_until_s', 'tier_first',
    'submitted_at_s', 'expires_at_s', 'tier', 'lane')
  local state, token, attempts = record[1], record[3], record[4]
  if not state then
    state = 'pending'
    local tier_first, _, name, submitted, expires = described(text, rest)
    record = { state, generation_text, false, false, false, tier_first, submitted, expires, tier, lane }
    call('HSET', key, 'name', name, 'tier', tier, 'tier_first', tier_first, 'lane', lane,
      'generation', generation_text, 'submitted_at_s', submitted, 'expires_at_s', expires)
    call('EXPIRE', key, ARGV[3])
  end
  local tier_first = record[6] or tier

  local is_new_life = false
  if record[2] ~= generation_text then
    local known, generation = number(record[2]) or 0, number(generation_text)
    if generation < known then return refuse(key, 'superseded', attempts, tier_first, token) end
    is_new_life = generation > known
  end
  if END[state] and not (is_new_life and state == 'failed') then
    local verdict = 'finished'
    if state == 'cancelled' or state == 'expired' then
      verdict = state
    elseif state == 'failed' and call('HGET', key, 'error_type') == 'WorkerLostError' then
      verdict = 'crashed'
    end
    return refuse(key, verdict, attempts, tier_first, token)
  end
  if state == 'processing' and (number(record[5]) or 0) > now then
    return refuse(key, 'held', attempts, tier_first, token)
  end

  if is_new_life then
    -- The mark of a replay is missing (Redis lost it, or it comes later): the message decides, limits start anew.
    call('HSET', key, 'generation', generation_text, 'failures', 0, 'crashes', 0)
    call('HDEL', key, 'finished_at_s', 'error_type', 'error_message')
    call('EXPIRE', key, ARGV[3])
    call('DEL', result_key(key))
  elseif state == 'processing' then
    local crashes = (number(call('HGET', key, 'crashes')) or 0) + 1
    if crashes >= (number(crash_limit) or default_limit) then
      local _, id = described(text, rest)
      fail_crashed(key, ARGV[4], id, crashes, now)
      return refuse(key, 'crashed', attempts, tier_first, token)
    end
    call('HSET', key, 'crashes', crashes)
  end

  local deadline = record[8] and record[8] ~= '' and number(record[8])
  if deadline and deadline <= now then
    call('HSET', key, 'state', 'expired', 'finished_at_s', now_text)
    call('HDEL', key, 'held_until_s')
    call('EXPIRE', key, ARGV[4])
    local _, id = described(text, rest)
    announce(key, ARGV[4], id, 'REVOKED', 'celery.exceptions', 'TaskRevokedError', 'expired')
    return refuse(key, 'expired', attempts, tier_first, token)
  end

  local new_token, own = common_token, ''
  if token and number(token) >= now_us then
    new_token = whole(number(token) + 1)
    own = new_token
  end
  local run = attempts and attempts + 1 or 1
  call('HSET', key, 'state', 'processing', 'token', new_token, 'attempts', run, 'worker', worker,
    'held_until_s', held_until, 'started_at_s', now_text)
  if record[9] ~= tier or record[10] ~= lane then call('HSET', key, 'tier', tier, 'lane', lane) end
  if crash_limit ~= '' and crash_limit ~= ARGV[5] then call('HSET', key, 'crash_limit', crash_limit) end
  return 'run\31' .. run .. FIELD .. tier_first .. FIELD .. (run == 1 and record[7] or '') .. FIELD .. own
end

local answers = { now_text .. FIELD .. held_until .. FIELD .. common_token }
for i = 1, #KEYS do
  answers[i + 1] = claim(KEYS[i], ARGV[5 + i])
end
return table.concat(answers, RECORD)
