-- Marks that a confirmed copy has taken the place of a waiting task's message: the older message is superseded.
-- KEYS     accounts, away, then one task record each
-- ARGV[1]  start of the ready keys
-- ARGV[2…] one per record, fields apart by \31: generation, hop of the copy, tier and lane where it lies, the id of the
--          task for whose sake it was lifted: empty if it was not, - if a lift has ended by this
-- Returns  for each 1 if it is marked, else 0, as a list
-- Atomic over the whole batch. Only a task of this generation that waits (a parked one: that is due; one that waited for
-- other tasks: that needs none any more) and whose record is exactly one hop behind is touched; of all others the claim
-- decides.

local now_s = clock()
local now = moment(now_s)
local answers = {}
for i = 3, #KEYS do
  local key = KEYS[i]
  local record = redis.call('HMGET', key, 'state', 'generation', 'hop', 'tier', 'lane', 'ready_at_s', 'tier_first')
  local state = record[1]
  local generation, hop, tier, lane, because =
    string.match(ARGV[i - 1], '^([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)$')
  local is_due = state == 'pending' or (state == 'retrying' and (tonumber(record[6] or 0)) <= now_s)
    or (state == 'waiting' and redis.call('EXISTS', beside(key, 'needs')) == 0)
  if is_due and record[2] == generation and tonumber(record[3] or 0) == hop - 1 then
    local id = id_of(key)
    departs(id, state, record[4], record[5])
    redis.call('HSET', key, 'state', 'pending', 'hop', hop, 'tier', tier, 'lane', lane, 'ready_at_s', now)
    redis.call('HDEL', key, 'due_at_s')
    -- Freed, its copy is stored: whatever becomes of the submit's own message, the record is not taken back.
    if state == 'waiting' then redis.call('HDEL', key, 'nonce', 'lift_to') end
    if because ~= '' then mark_lift(key, id, record[4], tier, because, now) end
    moved(record[7], state, 'pending')
    arrives(id, 'pending', tier, lane, now)
    answers[i - 2] = 1
  else
    answers[i - 2] = 0
  end
end
settle()
return answers
