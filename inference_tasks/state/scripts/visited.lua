-- Looks at tasks that wait for other tasks, when their messages have come round.
-- KEYS     accounts, away, then one task record each; the Celery result beside it is written where a task ends here
-- ARGV[1]  start of the ready keys   ARGV[2] lifetime of an unfinished, ARGV[3] of a finished record, seconds
-- ARGV[4…] three per key: the message's fields as claim.lua takes them; the ids of the tasks that it needs by its
--          message, apart by \31; the message, to be kept if the record has to be made, empty if it is not to be kept
-- Returns  one answer per task, apart by \30:
--            over: the message is not needed any more
--            unburied: the task has failed, and its message is not known to lie in the dead letters
--            free, then the tier in which it starts, apart by \31: all that it needed has succeeded
--            wait, then the ids of what it still needs, then of those among them that have no record and are in no index
--            of a queue; apart by \31, the ids in a list by \29
-- Atomic over the whole batch. A missing record is made from the message: it waits for what the message says.

local now = clock()
local now_text = moment(now)

local function is_listed(id)
  for tier in pairs(RANK) do
    for _, lane in ipairs({ 'fresh', 'returned', 'aged' }) do
      if redis.call('ZSCORE', ready_key(tier, lane), id) then return true end
    end
  end
  return false
end

local function make(key, text, list, message)
  local generation, tier, _, crash_limit, hop, rest = string.match(text,
    '^([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31()')
  local tier_first, id, name, submitted, expires, tenant = described(text, rest)
  redis.call('HSET', key, 'state', 'waiting', 'name', name, 'tier', tier, 'tier_first', tier_first, 'lane', 'returned',
    'generation', generation, 'hop', hop, 'submitted_at_s', submitted, 'expires_at_s', expires, 'ready_at_s', now_text)
  if tenant ~= '' then redis.call('HSET', key, 'tenant', tenant) end
  if crash_limit ~= '' then redis.call('HSET', key, 'crash_limit', crash_limit) end
  redis.call('EXPIRE', key, ARGV[2])
  local needs = {}
  for need in string.gmatch(list, '[^\31]+') do needs[#needs + 1] = need end
  if #needs > 0 then
    redis.call('SADD', beside(key, 'needs'), unpack(needs))
    redis.call('EXPIRE', beside(key, 'needs'), ARGV[2])
  end
  if message ~= '' then
    redis.call('SET', beside(key, 'message'), message, 'EX', ARGV[2])
    redis.call('HSET', key, 'kept', 1)
  end
  moved(tier_first, nil, 'waiting')
  arrives(id, 'waiting', tier, 'returned')
end

local function visit(key, text, list, message)
  local generation, hop = string.match(text, '^([^\31]*)\31[^\31]*\31[^\31]*\31[^\31]*\31([^\31]*)')
  if redis.call('EXISTS', key) == 0 then make(key, text, list, message) end
  local found = redis.call('HMGET', key, 'state', 'generation', 'hop', 'dead', 'expires_at_s')
  if found[2] ~= generation or tonumber(hop) < tonumber(found[3] or 0) then return 'over' end
  if found[1] == 'failed' and not found[4] then return 'unburied' end
  if found[1] ~= 'waiting' then return 'over' end
  local record, id = waiting_record(key), id_of(key)
  local needs, open, missing = beside(key, 'needs'), {}, {}
  for _, need in ipairs(redis.call('SMEMBERS', needs)) do
    local state = redis.call('HGET', task_key(need), 'state')
    if state == 'success' then
      redis.call('SREM', needs, need)
    elseif END[state or ''] then
      fail_dependent(key, ARGV[3], id, need, state, record, now)
      tell(key, 'failed', ARGV[3], now)
      return 'unburied'
    else
      open[#open + 1] = need
      if not state and not is_listed(need) then missing[#missing + 1] = need end
      redis.call('SADD', beside(task_key(need), 'dependents'), id)
      redis.call('EXPIRE', beside(task_key(need), 'dependents'), ARGV[2])
    end
  end
  local deadline = tonumber(found[5] or '')
  if deadline and deadline <= now then
    redis.call('HSET', key, 'state', 'expired', 'finished_at_s', now_text)
    redis.call('EXPIRE', key, ARGV[3])
    clear(key)
    announce(key, ARGV[3], id, 'REVOKED', 'celery.exceptions', 'TaskRevokedError', 'expired')
    departs(id, 'waiting', record.tier, record.lane)
    moved(record.tier_first, 'waiting', 'expired')
    tell(key, 'expired', ARGV[3], now)
    return 'over'
  end
  if #open == 0 then return 'free' .. FIELD .. record.start_tier end
  return 'wait' .. FIELD .. table.concat(open, '\29') .. FIELD .. table.concat(missing, '\29')
end

local answers = {}
for i = 3, #KEYS do answers[i - 2] = visit(KEYS[i], unpack(ARGV, 3 * i - 5, 3 * i - 3)) end
settle()
return table.concat(answers, RECORD)
