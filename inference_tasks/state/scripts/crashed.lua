-- Ends a run whose process died without a report: a crash more, the claim given back.
-- KEYS     task record; the Celery result beside it is written only where the task ends here
-- ARGV[1]  token   ARGV[2] default crash limit   ARGV[3] lifetime of a finished record, seconds   ARGV[4] id
-- Returns  crashes, and 1 if the task is over (else 0), apart by \31
-- Atomic. A claim that is over already, or a task that has ended, is not touched.

local key = KEYS[1]
local record = redis.call('HMGET', key, 'state', 'token', 'crashes', 'crash_limit')
local crashes = tonumber(record[3]) or 0
if record[1] ~= 'processing' or record[2] ~= ARGV[1] then
  return crashes .. FIELD .. (END[record[1] or ''] and 1 or 0)
end
crashes = crashes + 1
if crashes >= (tonumber(record[4] or '') or tonumber(ARGV[2])) then
  local now = clock()
  fail_crashed(key, ARGV[3], ARGV[4], crashes, now)
  return crashes .. FIELD .. 1
end
redis.call('HSET', key, 'state', 'pending', 'crashes', crashes)
redis.call('HDEL', key, 'held_until_s', 'worker')
return crashes .. FIELD .. 0
