-- Finds what must be lifted for the sake of tasks that wait for it, and of what waits for those in turn.
-- KEYS     accounts, away
-- ARGV[1]  start of the ready keys   ARGV[2] lifetime of an unfinished record, seconds   ARGV[3] most tasks to look at
-- ARGV[4…] three per wish: the id of a task, the tier that it should have at least, the id of the task that waits for it
-- Returns  what lies in a queue and is to be copied, apart by \30: id, generation, hop, tier it is to have, for whose
--          sake, message, apart by \31
-- Atomic. The records are found by their ids, so they cannot be named in KEYS. A task that waits itself only gets the
-- tier noted in which it will start. Of one whose message cannot be found it is noted why it is not lifted.

local now = moment((clock()))
local found, wishes, looked, place = {}, {}, 0, {}
for i = 4, #ARGV, 3 do wishes[#wishes + 1] = { ARGV[i], ARGV[i + 1], ARGV[i + 2] } end

local function lift(id, tier, because)
  local key = task_key(id)
  local record = redis.call('HMGET', key, 'state', 'tier', 'generation', 'hop', 'kept', 'lift_to')
  local state = record[1]
  if not state or END[state] or (RANK[record[6] or record[2]] or 0) >= RANK[tier] then return end
  if state == 'waiting' then
    redis.call('HSET', key, 'lift_to', tier)
    mark_lift(key, id, record[2], tier, because, now)
    for _, need in ipairs(redis.call('SMEMBERS', beside(key, 'needs'))) do
      wishes[#wishes + 1] = { need, tier, because }
    end
  elseif state == 'pending' then
    local message = record[5] and redis.call('GET', beside(key, 'message'))
    if message then
      -- Several may wait for it: one copy, in the highest of their tiers.
      place[id] = place[id] or { at = #found + 1, rank = 0 }
      if RANK[tier] > place[id].rank then
        place[id].rank = RANK[tier]
        found[place[id].at] = table.concat({ id, record[3], record[4] or '0', tier, because, message }, FIELD)
      end
    else
      redis.call('HSET', key, 'not_lifted', 'its message is not kept (state.lift_body_bytes)')
    end
  elseif state == 'retrying' then
    redis.call('HSET', key, 'not_lifted', 'it is parked until it is tried again')
  end
end

while wishes[looked + 1] and looked < tonumber(ARGV[3]) do
  looked = looked + 1
  lift(unpack(wishes[looked]))
end
redis.call('EXPIRE', lifted_key(), ARGV[2])
return table.concat(found, RECORD)
