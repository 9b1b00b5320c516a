-- Ends a run whose process died without a report: a crash more, the claim given back.
-- KEYS     accounts, away, task record; the Celery result beside it is written only where the task ends here
-- ARGV[1]  start of the ready keys
-- ARGV[2]  token   ARGV[3] default crash limit   ARGV[4] lifetime of a finished record, seconds
-- Returns  crashes, and 1 if the task is over (else 0), apart by \31
-- Atomic. A claim that is over already, or a task that has ended, is not touched. One that was asked to stop ends as
-- cancelled.

local key = KEYS[3]
local record = redis.call('HMGET', key, 'state', 'token', 'crashes', 'crash_limit', 'tier_first', 'tier', 'lane',
  'ready_at_s', 'cancel')
local crashes = tonumber(record[3]) or 0
if record[1] ~= 'processing' or record[2] ~= ARGV[2] then
  return crashes .. FIELD .. (END[record[1] or ''] and 1 or 0)
end
crashes = crashes + 1
local now = clock()
local is_over = record[9] or crashes >= (tonumber(record[4] or '') or tonumber(ARGV[3]))
if record[9] then
  redis.call('HSET', key, 'crashes', crashes)
  end_cancelled(key, ARGV[4], id_of(key), now)
  moved(record[5], 'processing', 'cancelled')
  tell(key, 'cancelled', ARGV[4], now)
elseif is_over then
  fail_crashed(key, ARGV[4], id_of(key), crashes, now)
  moved(record[5], 'processing', 'failed')
  tell(key, 'failed', ARGV[4], now)
else
  redis.call('HSET', key, 'state', 'pending', 'crashes', crashes)
  redis.call('HDEL', key, 'held_until_s', 'worker')
  moved(record[5], 'processing', 'pending')
  arrives(id_of(key), 'pending', record[6], record[7], record[8] or moment(now))
end
settle()
return crashes .. FIELD .. (is_over and 1 or 0)
