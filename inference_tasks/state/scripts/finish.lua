-- Writes how a run ended: the record, Celery's result document and its announcement, together.
-- KEYS     task record, Celery result (also the channel), counters
-- ARGV[1]  token, empty for a write from outside a claim    ARGV[2]  generation, empty if unknown
-- ARGV[3]  state, empty to leave the record as it is (progress)
-- ARGV[4]  error type   ARGV[5] error message (empty if none)
-- ARGV[6]  result document, empty if none   ARGV[7] its lifetime in seconds, 0 for no end
-- ARGV[8]  lifetime of an unfinished, ARGV[9] of a finished record, seconds
-- ARGV[10] task name   ARGV[11] tier: for a record that has to be made   ARGV[12] 1 if it may be made
-- Returns  written | repeated | ended | stale | held | missing; all but the first change nothing
-- Atomic. End states absorb; an older token or generation is refused and counted.

local key, result_key = KEYS[1], KEYS[2]
local token, generation, state = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local record = redis.call('HMGET', key, 'state', 'token', 'generation', 'held_until_s', 'failures')
local known = record[1]
local now = clock()

local function refuse(why)
  if why == 'stale' then
    redis.call('HINCRBY', KEYS[3], 'stale_writes', 1)
    redis.call('EXPIRE', KEYS[3], ARGV[8])
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
  if ARGV[12] ~= '1' then return 'missing' end
  redis.call('HSET', key, 'name', ARGV[10], 'tier', ARGV[11], 'tier_first', ARGV[11], 'lane', '',
    'generation', generation or 0, 'attempts', token and 1 or 0)
end

if state ~= '' then
  local change = { 'state', state }
  local function set(field, value)
    change[#change + 1] = field
    change[#change + 1] = value
  end
  if token then set('token', ARGV[1]) end
  if state == 'failed' or state == 'retrying' then
    if token then set('failures', (tonumber(record[5]) or 0) + 1) end
    set('error_type', ARGV[4])
    set('error_message', ARGV[5])
  elseif record[5] then
    redis.call('HDEL', key, 'error_type', 'error_message')
  end
  if END[state] then set('finished_at_s', moment(now)) end
  redis.call('HSET', key, unpack(change))
  redis.call('HDEL', key, 'held_until_s')
  redis.call('EXPIRE', key, END[state] and ARGV[9] or ARGV[8])
end

local meta = ARGV[6]
if meta ~= '' then
  if ARGV[7] == '0' then
    redis.call('SET', result_key, meta)
  else
    redis.call('SET', result_key, meta, 'EX', ARGV[7])
  end
  redis.call('PUBLISH', result_key, meta)
end
return 'written'
