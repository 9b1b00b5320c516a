-- Marks that a copy of a dead letter has been published: the failed task waits again, in its next life.
-- KEYS     accounts, away, dead letters in their order, dead letters, task record
-- ARGV[1]  start of the ready keys   ARGV[2] lifetime of an unfinished record, seconds   ARGV[3] generation of the copy
-- Returns  1 if the task is in that life, begun here or by the copy's claim, or nothing is known of it; 0 if it has
--          not failed or is in a later one
-- Atomic. A record that is missing is made from the letter. The letter leaves the index, and the deadline is gone.

local key, id, generation = KEYS[5], id_of(KEYS[5]), tonumber(ARGV[3])
local now = moment((clock()))
local record = redis.call('HMGET', key, 'state', 'generation', 'tier_first', 'tier', 'dead')
local state, known = record[1], tonumber(record[2] or 0)
local stored = redis.call('HGET', KEYS[4], id)
local letter = stored and cjson.decode(string.match(stored, '^[^\31]*\31[^\31]*\31(.*)$'))

local function begin(tier)
  redis.call('HSET', key, 'state', 'pending', 'generation', ARGV[3], 'hop', 0, 'failures', 0, 'crashes', 0,
    'lane', 'returned', 'ready_at_s', now)
  redis.call('EXPIRE', key, ARGV[2])
  -- That of the life before may have outlived its record.
  redis.call('DEL', result_key(key))
  arrives(id, 'pending', tier, 'returned', now)
  unearth(KEYS[3], KEYS[4], id)
  settle()
  return 1
end

if not state then
  if not letter then return 1 end
  local counted_under, kind = string.match(stored, '^([^\31]*)\31([^\31]*)\31')
  local is_counted = kind ~= ''
  local tier_first = is_counted and counted_under or letter.tier_first
  local submitted = type(letter.submitted_at_s) == 'number' and moment(letter.submitted_at_s) or ''
  redis.call('HSET', key, 'name', letter.task, 'tier', letter.tier, 'tier_first', tier_first, 'attempts', letter.attempts,
    'submitted_at_s', submitted)
  if is_counted then count(tier_first, 'dead:' .. kind, -1) end
  moved(tier_first, is_counted and 'failed' or nil, 'pending')
  return begin(letter.tier)
end

if state == 'failed' and known < generation then
  if record[5] then count(record[3], 'dead:' .. record[5], -1) end
  redis.call('HDEL', key, 'finished_at_s', 'expires_at_s', 'error_type', 'error_message', 'dead', 'cancel')
  moved(record[3], 'failed', 'pending')
  return begin(record[4])
end

if known ~= generation then return 0 end
if letter and letter.generation < generation then unearth(KEYS[3], KEYS[4], id) end
return 1
