-- Read after batches.lua, before the scripts in which tasks end or are freed; never run alone.

-- A script that ends a task works on no more of those that wait for it than these. The others learn it when their own
-- messages come round.
local MOST_TOLD = 1000

-- What may start by now, apart by \31: id, generation, hop, the tier in which it starts, message.
local freed = {}

local function fail_dependent(key, ttl_s, id, cause, how, record, now)
  local message = 'It needed task ' .. cause .. ', which ended as ' .. how .. '.'
  redis.call('HSET', key, 'state', 'failed', 'finished_at_s', moment(now), 'error_type', 'DependencyFailedError',
    'error_message', message)
  redis.call('EXPIRE', key, ttl_s)
  clear(key)
  announce(key, ttl_s, id, 'FAILURE', 'inference_tasks.errors', 'DependencyFailedError', message)
  mark_in_batches(key, 'failed')
  departs(id, 'waiting', record.tier, record.lane)
  moved(record.tier_first, 'waiting', 'failed')
end

local function waiting_record(key)
  local found = redis.call('HMGET', key, 'state', 'tier', 'lane', 'tier_first', 'generation', 'hop',
    'lift_to')
  if found[1] ~= 'waiting' then return nil end
  return { tier = found[2], lane = found[3], tier_first = found[4], generation = found[5], hop = found[6] or '0',
    start_tier = found[7] or found[2] }
end

local function free(key, id, record)
  local message = redis.call('GET', beside(key, 'message'))
  -- Without it, its message will do when it comes round.
  if message then
    freed[#freed + 1] = table.concat({ id, record.generation, record.hop, record.start_tier, message }, FIELD)
  end
end

-- Tells those who wait for a task how it has ended: its success frees them, any other end fails them, and in turn those
-- who wait for them; and counts it in its batches.
local function tell(key, how, ttl_s, now)
  mark_in_batches(key, how)
  if redis.call('EXISTS', beside(key, 'dependents')) == 0 then return end
  local ended, told, at = { { id_of(key), how } }, 0, 1
  while ended[at] and told < MOST_TOLD do
    local id, state = ended[at][1], ended[at][2]
    at = at + 1
    local dependents = redis.call('SPOP', beside(task_key(id), 'dependents'), MOST_TOLD - told)
    told = told + #dependents
    for _, dependent in ipairs(dependents) do
      local its_key = task_key(dependent)
      local record = waiting_record(its_key)
      if record and redis.call('SISMEMBER', beside(its_key, 'needs'), id) == 1 then
        if state ~= 'success' then
          fail_dependent(its_key, ttl_s, dependent, id, state, record, now)
          ended[#ended + 1] = { dependent, 'failed' }
        elseif redis.call('SREM', beside(its_key, 'needs'), id) == 1
          and redis.call('EXISTS', beside(its_key, 'needs')) == 0 then
          free(its_key, dependent, record)
        end
      end
    end
  end
end
