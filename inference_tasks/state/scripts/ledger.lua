-- Read after prelude.lua, before the scripts that change states; never run alone.
-- Keeps the counts, `away` and the ready indices in step with the records. These scripts take KEYS[1] accounts, KEYS[2]
-- away, then their own keys, and ARGV[1] what the keys of the ready indices begin with. What changes is summed up, and
-- applied by settle(), once at the end of a script: a few calls for a batch, however large.
-- invariant: a task is in the index of the queue of its record's tier and lane while it is pending or retrying, and
-- counts as away while it is retrying or waiting, or pending in `returned`. So no record keeps a mark that could be wrong.

local ACCOUNTS, AWAY, READY = KEYS[1], KEYS[2], ARGV[1]
local ID_FROM = #ACCOUNTS - 6
local deltas, away_deltas, arrivals, departures = {}, {}, {}, {}

-- The id in a task's key, which keys.py makes of prefix, {id} and :task.
local function id_of(task_key) return string.sub(task_key, ID_FROM, -7) end

local function task_key(id) return string.sub(ACCOUNTS, 1, -9) .. '{' .. id .. '}:task' end

local function count(tier_first, name, by)
  local field = tier_first .. ':' .. name
  deltas[field] = (deltas[field] or 0) + by
end

-- Counts a change of state; without a state before, the task is admitted.
local function moved(tier_first, before, after)
  if before == after then return end
  if before then count(tier_first, before, -1) else count(tier_first, 'admitted', 1) end
  count(tier_first, after, 1)
end

local function ready_key(tier, lane)
  if lane == 'fresh' then return READY .. '.' .. tier end
  return READY .. '.' .. tier .. '.' .. lane
end

local function waits(state) return state == 'pending' or state == 'retrying' end

local function count_away(state, tier, lane, by)
  if state == 'retrying' or state == 'waiting' or lane == 'returned' then away_deltas[tier] = (away_deltas[tier] or 0) + by end
end

-- not for work without a tier: it lies in no queue of ours. What waits for other tasks is in none yet.
local function arrives(id, state, tier, lane, ready_at)
  if tier == '' then return end
  count_away(state, tier, lane, 1)
  if state == 'waiting' then return end
  local key = ready_key(tier, lane)
  local list = arrivals[key]
  if not list then
    list = {}
    arrivals[key] = list
  end
  list[#list + 1] = ready_at
  list[#list + 1] = id
end

local function unlist(id, key)
  local list = departures[key]
  if not list then
    list = {}
    departures[key] = list
  end
  list[#list + 1] = id
end

local function departs(id, state, tier, lane)
  local is_listed = waits(state)
  if tier == '' or not (is_listed or state == 'waiting') then return end
  if is_listed then unlist(id, ready_key(tier, lane)) end
  count_away(state, tier, lane, -1)
end

local function in_pieces(command, key, list)
  for from = 1, #list, 2000 do
    redis.call(command, key, unpack(list, from, math.min(from + 1999, #list)))
  end
end

local function settle()
  local is_first = false
  for field, by in pairs(deltas) do
    if by ~= 0 and redis.call('HINCRBY', ACCOUNTS, field, by) == by then is_first = true end
  end
  if is_first then redis.call('HSETNX', ACCOUNTS, 'since_s', moment((clock()))) end
  for tier, by in pairs(away_deltas) do
    if by ~= 0 then redis.call('HINCRBY', AWAY, tier, by) end
  end
  for key, list in pairs(departures) do in_pieces('ZREM', key, list) end
  for key, list in pairs(arrivals) do in_pieces('ZADD', key, list) end
end

-- Makes a submit, by its nonce, a holder of a task.
local function hold(task_key, nonce, tier, expires, ttl_s)
  local holders = holders_key(task_key)
  redis.call('HSET', holders, nonce, tier .. '|' .. expires)
  redis.call('EXPIRE', holders, ttl_s)
end

-- Takes a holder out; whether others are left.
local function is_held_by_others(task_key, nonce)
  local holders = holders_key(task_key)
  redis.call('HDEL', holders, nonce)
  return redis.call('EXISTS', holders) == 1
end

local RANK = { realtime = 3, batch = 2, offline = 1 }

-- Gives a task what its holders want together: the latest of their deadlines, none if one of them has none, and the
-- highest of their tiers. Each is kept as tier|deadline.
local function weigh(task_key)
  local latest, highest = 0, ''
  local held = redis.call('HVALS', holders_key(task_key))
  for i = 1, #held do
    local tier, expires = string.match(held[i], '^([^|]*)|(.*)$')
    if expires == '' then
      latest = nil
    elseif latest and tonumber(expires) > latest then
      latest = tonumber(expires)
    end
    if (RANK[tier] or 0) > (RANK[highest] or 0) then highest = tier end
  end
  redis.call('HSET', task_key, 'expires_at_s', latest and moment(latest) or '', 'tier_wanted', highest)
end

-- The tasks that are lifted, by the time of that.
local function lifted_key() return string.sub(ACCOUNTS, 1, -9) .. 'lifted' end

-- What operators have switched off.
local function switches_key() return string.sub(ACCOUNTS, 1, -9) .. 'switches' end

-- Notes in a record that its task has got another tier for the sake of one that waits for it.
local function mark_lift(key, id, tier_before, tier, because, now)
  local from = redis.call('HGET', key, 'lifted_from') or tier_before
  if from == tier then
    redis.call('HDEL', key, 'lifted_from', 'lifted_by')
    redis.call('ZREM', lifted_key(), id)
    return
  end
  redis.call('HSET', key, 'lifted_from', from)
  if because ~= '-' then redis.call('HSET', key, 'lifted_by', because) end
  redis.call('HDEL', key, 'not_lifted')
  redis.call('ZADD', lifted_key(), now, id)
end

-- Takes a letter out of the index of the dead; returns the first tier and the kind that it is counted under, an empty
-- kind where it is not counted, nil where there is none.
local function unearth(dead_key, letters_key, id)
  local stored = redis.call('HGET', letters_key, id)
  if not stored then return nil end
  redis.call('ZREM', dead_key, id)
  redis.call('HDEL', letters_key, id)
  return string.match(stored, '^([^\31]*)\31([^\31]*)\31')
end
