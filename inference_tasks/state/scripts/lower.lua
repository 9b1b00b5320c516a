-- Finds lifted tasks that nobody needs in that tier any more.
-- KEYS     accounts, away
-- ARGV[1]  start of the ready keys   ARGV[2] most tasks to look at
-- Returns  what lies in a queue and is to be copied, apart by \30: id, generation, hop, tier it is to have, -, message,
--          apart by \31
-- Atomic. Records and sets are found by their ids, so they cannot be named in KEYS. The tasks that have started, or ended,
-- are forgotten; one that waits itself gets its tier back here.

local MOST_DEPENDENTS = 1000
local now = moment((clock()))
local found = {}

-- The highest tier in which somebody needs it: whoever waits for it, or shares it.
local function needed(key)
  local dependents = beside(key, 'dependents')
  if redis.call('SCARD', dependents) > MOST_DEPENDENTS then return 'realtime' end
  local highest = redis.call('HGET', key, 'tier_wanted') or ''
  for _, dependent in ipairs(redis.call('SMEMBERS', dependents)) do
    local record = redis.call('HMGET', task_key(dependent), 'state', 'tier', 'lift_to')
    local tier = record[3] or record[2]
    local is_needed = redis.call('SISMEMBER', beside(task_key(dependent), 'needs'), id_of(key)) == 1
    if is_needed and record[1] == 'waiting' and (RANK[tier] or 0) > (RANK[highest] or 0) then highest = tier end
  end
  return highest
end

local function lower(id)
  local key = task_key(id)
  local record = redis.call('HMGET', key, 'state', 'tier', 'generation', 'hop', 'lifted_from', 'lift_to')
  local state, from = record[1], record[5]
  if not from or not (waits(state) or state == 'waiting') then
    redis.call('ZREM', lifted_key(), id)
    return
  end
  local tier = needed(key)
  if (RANK[tier] or 0) < (RANK[from] or 0) then tier = from end
  if (RANK[tier] or 0) >= (RANK[record[6] or record[2]] or 0) then return end
  if state == 'waiting' then
    if tier == record[2] then redis.call('HDEL', key, 'lift_to') else redis.call('HSET', key, 'lift_to', tier) end
    mark_lift(key, id, record[2], tier, '-', now)
    return
  end
  local message = state == 'pending' and redis.call('GET', beside(key, 'message'))
  if message then
    found[#found + 1] = table.concat({ id, record[3], record[4] or '0', tier, '-', message }, FIELD)
  end
end

for _, id in ipairs(redis.call('ZRANGE', lifted_key(), 0, ARGV[2] - 1)) do lower(id) end
return table.concat(found, RECORD)
