-- Gives back claims: as if they had not been made, but for the token, which never shrinks.
-- KEYS     accounts, away, then one task record each; the Celery result beside it is written where a task ends here
-- ARGV[1]  start of the ready keys   ARGV[2] how many attempts are taken back: 1 if the runs never started, else 0
-- ARGV[3]  lifetime of a finished record, seconds
-- ARGV[4…] one per record: the claim's token
-- Returns  nothing
-- Atomic over the whole batch; a claim that is over, or not of this token, is not touched. A task waits again where and
-- since when it did; one that had been parked is so no more. One that was asked to stop ends as cancelled.

local now = clock()
for i = 3, #KEYS do
  local key = KEYS[i]
  local record = redis.call('HMGET', key, 'state', 'token', 'attempts', 'tier_first', 'tier', 'lane', 'ready_at_s',
    'cancel')
  if record[1] == 'processing' and record[2] == ARGV[i + 1] then
    redis.call('HSET', key, 'state', 'pending', 'attempts', record[3] - ARGV[2])
    redis.call('HDEL', key, 'held_until_s', 'worker', 'started_at_s')
    if record[8] then
      end_cancelled(key, ARGV[3], id_of(key), now)
      moved(record[4], 'processing', 'cancelled')
      tell(key, 'cancelled', ARGV[3], now)
    else
      moved(record[4], 'processing', 'pending')
      arrives(id_of(key), 'pending', record[5], record[6], record[7] or moment(now))
    end
  end
end
settle()
