-- Ends waiting tasks whose message is gone, and wakes those who wait for their results.
-- KEYS     accounts, away, then one task record each; the Celery result beside each is written
-- ARGV[1]  start of the ready keys   ARGV[2] lifetime of a finished record, seconds   ARGV[3] reason
-- ARGV[4…] one per record, fields apart by \31: generation and hop of the message that is gone
-- Returns  how many tasks ended so
-- Atomic over the whole batch. Only pending tasks, and parked ones that are due, go, and none whose present message is
-- another one: of a later generation or hop.

local now_s = clock()
local now = moment(now_s)
local ended = 0
for i = 3, #KEYS do
  local key = KEYS[i]
  local record = redis.call('HMGET', key, 'state', 'generation', 'hop', 'tier', 'lane', 'ready_at_s', 'tier_first')
  local state = record[1]
  local generation, hop = string.match(ARGV[i + 1], '^([^\31]*)\31([^\31]*)$')
  local is_due = state == 'pending' or (state == 'retrying' and (tonumber(record[6] or 0)) <= now_s)
  if is_due and record[2] == generation and tonumber(hop) >= tonumber(record[3] or 0) then
    local id = id_of(key)
    departs(id, state, record[4], record[5])
    redis.call('HSET', key, 'state', 'dropped', 'finished_at_s', now, 'error_type', 'dropped', 'error_message', ARGV[3])
    redis.call('HDEL', key, 'due_at_s')
    redis.call('EXPIRE', key, ARGV[2])
    clear(key)
    announce(key, ARGV[2], id, 'REVOKED', 'celery.exceptions', 'TaskRevokedError', 'dropped: ' .. ARGV[3])
    moved(record[7], state, 'dropped')
    tell(key, 'dropped', ARGV[2], now_s)
    ended = ended + 1
  end
end
settle()
return ended
