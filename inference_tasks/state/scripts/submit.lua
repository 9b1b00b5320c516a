-- Makes a record for each task that has none.
-- KEYS     accounts, away, then one task record each
-- ARGV[1]  start of the ready keys   ARGV[2] lifetime of an unfinished record, seconds
-- ARGV[3]  bounds: tier, number, tier, number, … apart by \31
-- ARGV[4…] one per key, fields apart by \31: name, tier, tier_first, lane, generation, nonce,
--          expires_at_s, due_at_s: each empty, unix seconds, or +seconds from now; hop; 1 if it may be refused, else 0;
--          tenant, empty for none
-- Returns  the states apart by \30, each with + before it where this call made the record; "parked" where none was
--          made because the tier has as much work away as its bound
-- Atomic over the whole batch, which counts towards the bound itself; a record that exists is not touched.

local now = moment((clock()))
local ttl_s = ARGV[2]
local away_before, bounds = {}, nil

local function is_refused(tier)
  if not bounds then
    bounds = {}
    for name, number in string.gmatch(ARGV[3], '([^\31]+)\31([^\31]+)') do bounds[name] = tonumber(number) end
  end
  if not bounds[tier] then return false end
  if not away_before[tier] then away_before[tier] = tonumber(redis.call('HGET', AWAY, tier) or 0) end
  return away_before[tier] + (away_deltas[tier] or 0) >= bounds[tier]
end

local function at(text)
  return string.byte(text) == 43 and moment(now + string.sub(text, 2)) or text
end

local answers = {}
for i = 3, #KEYS do
  local key = KEYS[i]
  local state = redis.call('HGET', key, 'state')
  if not state then
    local name, tier, tier_first, lane, generation, nonce, expires, due, hop, may_be_refused, tenant = string.match(ARGV[i + 1],
      '^([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31(.)\31([^\31]*)$')
    if may_be_refused == '1' and is_refused(tier) then
      state = 'parked'
    else
      local ready_at = now
      if due ~= '' then
        ready_at = at(due)
        if lane == 'fresh' then lane = 'returned' end
        redis.call('HSET', key, 'due_at_s', ready_at)
      end
      -- One less than a copy's own: until it is confirmed, the message that it replaces is the only one there is.
      if hop ~= '0' then redis.call('HSET', key, 'hop', hop - 1) end
      redis.call('HSET', key, 'state', 'pending', 'name', name, 'tier', tier, 'tier_first', tier_first, 'lane', lane,
        'generation', generation, 'nonce', nonce, 'submitted_at_s', now, 'expires_at_s', at(expires),
        'ready_at_s', ready_at)
      if tenant ~= '' then redis.call('HSET', key, 'tenant', tenant) end
      redis.call('EXPIRE', key, ttl_s)
      moved(tier_first, nil, 'pending')
      arrives(id_of(key), 'pending', tier, lane, ready_at)
      state = '+pending'
    end
  end
  answers[i - 2] = state
end
settle()
return table.concat(answers, RECORD)
