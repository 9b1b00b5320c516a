-- Leases tasks to a worker before they start, or says why they must not start.
-- KEYS     accounts, away, dead letters in their order, dead letters, then one task record each; the Celery result
--          beside a record is written only where a task ends here
-- ARGV[1]  start of the ready keys
-- ARGV[2]  worker   ARGV[3] lease, seconds   ARGV[4] lifetime of an unfinished, ARGV[5] of a finished record, seconds
-- ARGV[6]  default crash limit
-- ARGV[7…] one per task, fields apart by \31: generation, tier, lane, crash_limit, hop, tier_first, id, name,
--          submitted_at_s, expires_at_s, tenant (crash_limit and the last three may be empty)
-- Returns  server time, end of the new leases (unix seconds) and their token, apart by \31, then one answer per task,
--          each after a \30:
--            run, attempts, tier_first, submitted_at_s of a first attempt (else empty), token if it is not the common one
--            any other verdict, attempts, tier_first, token, held_until_s, worker (both empty unless held)
-- Atomic over the whole batch; of two messages of one task in a batch the second finds the first's claim. A missing
-- record is made from the message. A claim over an ended lease counts a crash. token = max(previous + 1, server time
-- in microseconds), so it grows even when Redis has forgotten the previous one. A task that was asked to stop is not run
-- again. A message with fewer hops than the
-- record is superseded whatever the state; one with more says that the mark of its copying is missing, and is believed.

local now, now_us = clock()
local worker = ARGV[2]
local held_until, now_text, common_token = moment(now + ARGV[3]), moment(now), whole(now_us)
local default_limit = tonumber(ARGV[6])
local call, match, number = redis.call, string.match, tonumber

local function refuse(key, verdict, attempts, tier_first, token)
  local holder, held = '', ''
  if verdict == 'held' then
    local found = call('HMGET', key, 'worker', 'held_until_s')
    holder, held = found[1] or '', found[2]
  end
  return table.concat({ verdict, attempts or 0, tier_first, token or 0, held, holder }, FIELD)
end

-- What the state was before, for the counts: nothing, unless it is the next life of a task whose record has ended its
-- days while its letter lay among the dead.
local function make(key, id, generation_text, tier, lane, text, rest)
  local tier_first, _, name, submitted, expires, tenant = described(text, rest)
  local before
  if generation_text ~= '0' then
    local counted_under, kind = unearth(KEYS[3], KEYS[4], id)
    if kind and kind ~= '' then
      tier_first, before = counted_under, 'failed'
      count(tier_first, 'dead:' .. kind, -1)
    end
  end
  local since = number(submitted) and number(submitted) < now and submitted or now_text
  call('HSET', key, 'name', name, 'tier', tier, 'tier_first', tier_first, 'lane', lane,
    'generation', generation_text, 'submitted_at_s', submitted, 'expires_at_s', expires, 'ready_at_s', since)
  if tenant ~= '' then call('HSET', key, 'tenant', tenant) end
  call('EXPIRE', key, ARGV[4])
  -- Only an index that was noted anew can know a task without a record.
  unlist(id, ready_key(tier, lane))
  return { 'pending', generation_text, false, false, false, tier_first, submitted, expires, tier, lane }, before
end

local function claim(key, text)
  local generation_text, tier, lane, crash_limit, hop_text, rest = match(text,
    '^([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31()')
  local record = call('HMGET', key, 'state', 'generation', 'token', 'attempts', 'held_until_s', 'tier_first',
    'submitted_at_s', 'expires_at_s', 'tier', 'lane', 'hop', 'cancel', 'kept')
  local state, token, attempts = record[1], record[3], record[4]
  local before, id, is_known = state, id_of(key), state
  if not is_known then
    record, before = make(key, id, generation_text, tier, lane, text, rest)
    state = 'pending'
  end
  local tier_first = record[6] or tier

  local is_new_life = false
  if record[2] ~= generation_text then
    local known, generation = number(record[2]) or 0, number(generation_text)
    if generation < known then return refuse(key, 'superseded', attempts, tier_first, token) end
    is_new_life = generation > known
  end
  local known_hop = record[11] or '0'
  if not is_new_life and hop_text ~= known_hop and number(hop_text) < number(known_hop) then
    return refuse(key, 'superseded', attempts, tier_first, token)
  end
  if END[state] and not (is_new_life and state == 'failed') then
    local verdict = 'finished'
    if state == 'cancelled' or state == 'expired' then
      verdict = state
    elseif state == 'failed' and not call('HGET', key, 'dead') then
      verdict = 'unburied'
    end
    return refuse(key, verdict, attempts, tier_first, token)
  end
  if state == 'processing' and (number(record[5]) or 0) > now then
    return refuse(key, 'held', attempts, tier_first, token)
  end
  if state == 'waiting' and not is_new_life and hop_text == known_hop
    and call('EXISTS', beside(key, 'needs')) == 1 then
    return refuse(key, 'waiting', attempts, tier_first, token)
  end

  if is_new_life then
    -- The mark of a replay is missing (Redis lost it, or it comes later): the message decides, limits start anew.
    if state == 'failed' then
      local kind = call('HGET', key, 'dead')
      if kind then
        count(tier_first, 'dead:' .. kind, -1)
        unearth(KEYS[3], KEYS[4], id)
      end
    end
    -- So is the deadline: that of the life before is over for most that are replayed.
    local _, _, _, _, expires = described(text, rest)
    record[8] = expires
    call('HSET', key, 'generation', generation_text, 'failures', 0, 'crashes', 0, 'expires_at_s', expires)
    call('HDEL', key, 'finished_at_s', 'error_type', 'error_message', 'dead', 'cancel')
    call('EXPIRE', key, ARGV[4])
    clear(key)
    call('DEL', result_key(key))
  elseif state == 'processing' then
    local crashes = (number(call('HGET', key, 'crashes')) or 0) + 1
    if record[12] then
      call('HSET', key, 'hop', hop_text, 'crashes', crashes)
      end_cancelled(key, ARGV[5], id, now)
      moved(tier_first, before, 'cancelled')
      tell(key, 'cancelled', ARGV[5], now)
      return refuse(key, 'cancelled', attempts, tier_first, token)
    end
    if crashes >= (number(crash_limit) or default_limit) then
      call('HSET', key, 'hop', hop_text)
      fail_crashed(key, ARGV[5], id, crashes, now)
      moved(tier_first, before, 'failed')
      tell(key, 'failed', ARGV[5], now)
      return refuse(key, 'crashed', attempts, tier_first, token)
    end
    call('HSET', key, 'crashes', crashes)
  end
  if is_known and (waits(state) or state == 'waiting') then
    departs(id, state, record[9], record[10])
    if record[10] ~= 'fresh' then call('HDEL', key, 'due_at_s') end
    if record[13] or state == 'waiting' then
      call('HDEL', key, 'kept')
      call('DEL', beside(key, 'needs'), beside(key, 'message'))
    end
  end
  if hop_text ~= known_hop then call('HSET', key, 'hop', hop_text) end

  local deadline = record[8] and record[8] ~= '' and number(record[8])
  if deadline and deadline <= now then
    call('HSET', key, 'state', 'expired', 'finished_at_s', now_text)
    call('HDEL', key, 'held_until_s')
    call('EXPIRE', key, ARGV[5])
    clear(key)
    announce(key, ARGV[5], id, 'REVOKED', 'celery.exceptions', 'TaskRevokedError', 'expired')
    moved(tier_first, before, 'expired')
    tell(key, 'expired', ARGV[5], now)
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
  if crash_limit ~= '' and crash_limit ~= ARGV[6] then call('HSET', key, 'crash_limit', crash_limit) end
  moved(tier_first, before, 'processing')
  return 'run\31' .. run .. FIELD .. tier_first .. FIELD .. (run == 1 and record[7] or '') .. FIELD .. own
end

local answers = { now_text .. FIELD .. held_until .. FIELD .. common_token }
for i = 5, #KEYS do
  answers[i - 3] = claim(KEYS[i], ARGV[2 + i])
end
settle()
return table.concat(answers, RECORD)
