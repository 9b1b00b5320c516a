-- Writes how a run ended: the record, Celery's result document and its announcement, together.
-- KEYS     accounts, away, task record, Celery result (also the channel), counters
-- ARGV[1]  start of the ready keys
-- ARGV[2]  token, empty for a write from outside a claim    ARGV[3]  generation, empty if unknown
-- ARGV[4]  state, empty to leave the record as it is (progress)
-- ARGV[5]  error type   ARGV[6] error message (empty if none)
-- ARGV[7]  result document, empty if none   ARGV[8] its lifetime in seconds, 0 for no end
-- ARGV[9]  lifetime of an unfinished, ARGV[10] of a finished record, seconds
-- ARGV[11] task name   ARGV[12] tier: for a record that has to be made   ARGV[13] 1 if it may be made
-- ARGV[14] with state retrying: when the parked message is due, unix seconds; empty if none is parked
-- Returns  written | repeated | ended | stale | held | missing; all but the first change nothing. After written come the
--          tasks that this success has freed, each after a \30: id, generation, hop, tier, message, apart by \31
-- Atomic. End states absorb; an older token or generation is refused and counted. A task that was asked to stop is not
-- tried again: it ends as cancelled.

local key, result_key = KEYS[3], KEYS[4]
local token, generation, state = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local is_stopped = false
local record = redis.call('HMGET', key, 'state', 'token', 'generation', 'held_until_s', 'failures', 'tier_first', 'tier',
  'lane', 'hop', 'cancel')
local known = record[1]
local now = clock()

local function refuse(why)
  if why == 'stale' then
    redis.call('HINCRBY', KEYS[5], 'stale_writes', 1)
    redis.call('EXPIRE', KEYS[5], ARGV[9])
  end
  return why
end

if known then
  local known_token = tonumber(record[2]) or 0
  local known_generation = tonumber(record[3]) or 0
  if generation and generation < known_generation then return refuse('stale') end
  if token and token < known_token then return refuse('stale') end
  if END[known] then
    if token and token == known_token and known == state then return 'repeated' end
    return refuse('ended')
  end
  if token then
    if token == known_token and known == state then return 'repeated' end
    if token == known_token and known ~= 'processing' then return refuse('stale') end
  elseif state ~= '' and known == 'processing' and (tonumber(record[4]) or 0) > now then
    return refuse('held')
  end
elseif state ~= '' then
  if ARGV[13] ~= '1' then return 'missing' end
  redis.call('HSET', key, 'name', ARGV[11], 'tier', ARGV[12], 'tier_first', ARGV[12], 'lane', '',
    'generation', generation or 0, 'attempts', token and 1 or 0)
  record[6], record[7], record[8] = ARGV[12], ARGV[12], ''
end

if state == 'retrying' and record[10] then
  state, is_stopped = 'cancelled', true
end

if state ~= '' then
  local change = { 'state', state }
  local function set(field, value)
    change[#change + 1] = field
    change[#change + 1] = value
  end
  if token then set('token', ARGV[2]) end
  if state == 'failed' or state == 'retrying' then
    if token then set('failures', (tonumber(record[5]) or 0) + 1) end
    set('error_type', ARGV[5])
    set('error_message', ARGV[6])
  elseif record[5] then
    redis.call('HDEL', key, 'error_type', 'error_message')
  end
  if END[state] then set('finished_at_s', moment(now)) end

  local tier_first, tier, lane, due = record[6], record[7], record[8], ARGV[14]
  if waits(known) or known == 'waiting' then
    departs(id_of(key), known, tier, lane)
    redis.call('HDEL', key, 'due_at_s')
  end
  -- Celery may write a retry of a task that waits: it waits for nobody then, and nobody's success frees it once more.
  if known == 'waiting' then redis.call('DEL', beside(key, 'needs')) end
  if state == 'retrying' then
    if lane ~= 'aged' then lane = 'returned' end
    local ready_at = due ~= '' and due or moment(now)
    set('lane', lane)
    set('ready_at_s', ready_at)
    if due ~= '' then
      set('due_at_s', due)
      -- not where the record is not this claim's, made anew since: its hop may be the parked copy's already, and a hop
      -- too high would lose the task.
      if token and record[2] == ARGV[2] then set('hop', tonumber(record[9] or 0) + 1) end
    end
    arrives(id_of(key), state, tier, lane, ready_at)
  end
  moved(tier_first, known, state)

  redis.call('HSET', key, unpack(change))
  redis.call('HDEL', key, 'held_until_s')
  redis.call('EXPIRE', key, END[state] and ARGV[10] or ARGV[9])
  if END[state] then
    clear(key)
    tell(key, state, ARGV[10], now)
  end
  settle()
end

if is_stopped then
  redis.call('HINCRBY', key, 'failures', token and 1 or 0)
  announce(key, ARGV[10], id_of(key), 'REVOKED', 'celery.exceptions', 'TaskRevokedError', 'cancelled')
  return 'written'
end

local meta = ARGV[7]
if meta ~= '' then
  if ARGV[8] == '0' then
    redis.call('SET', result_key, meta)
  else
    redis.call('SET', result_key, meta, 'EX', ARGV[8])
  end
  redis.call('PUBLISH', result_key, meta)
end
return table.concat({ 'written', unpack(freed) }, RECORD)
