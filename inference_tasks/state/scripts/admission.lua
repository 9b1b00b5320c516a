-- Read after ledger.lua, before the scripts that submit; never run alone.
-- Decides whether a task may be taken in, and makes its record. These scripts take ARGV[2] lifetime of an unfinished
-- record in seconds, ARGV[3] bounds: tier, number, tier, number, … apart by \31; and of each task its fields apart by
-- \31: name, tier, tier_first, lane, generation, nonce, expires_at_s, due_at_s: each empty, unix seconds, or +seconds
-- from now; hop; 1 if it may be refused, else 0; tenant, empty for none; how many of its tier may wait before it, empty
-- for any number; its message, empty if it is not to be kept.

local NOW = moment((clock()))
local FIELDS = '^([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)'
  .. '\31([^\31]*)\31(.)\31([^\31]*)\31([^\31]*)\31(.*)$'
local away_before, waiting_before, refused, bounds = {}, {}, {}, nil

-- Whether an operator has switched off the submits of a tier.
local function is_refused(tier)
  if refused[tier] == nil then
    refused[tier] = false
    local found = redis.call('HMGET', switches_key(), 'tier:' .. tier, 'lane:' .. tier .. '.fresh')
    for i = 1, 2 do
      local action = found[i] and cjson.decode(found[i]).action
      if action == 'refuse' or action == 'drain' then refused[tier] = true end
    end
  end
  return refused[tier]
end

local function is_parked(tier)
  if not bounds then
    bounds = {}
    for name, number in string.gmatch(ARGV[3], '([^\31]+)\31([^\31]+)') do bounds[name] = tonumber(number) end
  end
  if not bounds[tier] then return false end
  if not away_before[tier] then away_before[tier] = tonumber(redis.call('HGET', AWAY, tier) or 0) end
  return away_before[tier] + (away_deltas[tier] or 0) >= bounds[tier]
end

-- How many tasks of a tier wait for a start, those of this batch too; what is parked is not due yet.
local function ahead_in(tier)
  local fresh, returned = ready_key(tier, 'fresh'), ready_key(tier, 'returned')
  if not waiting_before[tier] then
    waiting_before[tier] = redis.call('ZCARD', fresh) + redis.call('ZCOUNT', returned, '-inf', NOW)
  end
  return waiting_before[tier] + #(arrivals[fresh] or {}) / 2 + #(arrivals[returned] or {}) / 2
end

local function at(text)
  return string.byte(text) == 43 and moment(NOW + string.sub(text, 2)) or text
end

local function refusal(tier_first, reason)
  count(tier_first, 'refused:' .. reason, 1)
  return reason
end

-- Returns +pending, or why there is no record: paused, parked, or late: and how many wait before it. A task that is shared gets
-- further fields; one that waits for other tasks gets a state of its own.
local function admit(key, text, fields, state)
  local name, tier, tier_first, lane, generation, nonce, expires, due, hop, may_be_refused, tenant, max_ahead, message =
    string.match(text, FIELDS)
  if may_be_refused == '1' then
    if is_refused(tier) then return refusal(tier_first, 'paused') end
    if is_parked(tier) then return refusal(tier_first, 'parked') end
    if max_ahead ~= '' then
      local ahead = ahead_in(tier)
      if ahead > tonumber(max_ahead) then return refusal(tier_first, 'late') .. ':' .. ahead end
    end
  end
  local ready_at = NOW
  if due ~= '' then
    ready_at = at(due)
    if lane == 'fresh' then lane = 'returned' end
    redis.call('HSET', key, 'due_at_s', ready_at)
  end
  -- One less than a copy's own: until it is confirmed, the message that it replaces is the only one there is.
  if hop ~= '0' then redis.call('HSET', key, 'hop', hop - 1) end
  state = state or 'pending'
  redis.call('HSET', key, 'state', state, 'name', name, 'tier', tier, 'tier_first', tier_first, 'lane', lane,
    'generation', generation, 'nonce', nonce, 'submitted_at_s', NOW, 'expires_at_s', at(expires),
    'ready_at_s', ready_at)
  if tenant ~= '' then redis.call('HSET', key, 'tenant', tenant) end
  if message ~= '' then
    redis.call('HSET', key, 'kept', 1)
    redis.call('SET', beside(key, 'message'), message, 'EX', ARGV[2])
  end
  if fields then redis.call('HSET', key, unpack(fields)) end
  redis.call('EXPIRE', key, ARGV[2])
  moved(tier_first, nil, state)
  arrives(id_of(key), state, tier, lane, ready_at)
  return '+' .. state
end
