-- Puts tasks that Redis forgot back into the index of the queue in which they were seen.
-- KEYS     accounts, away, the queue's index, then one task record each
-- ARGV[1]  start of the ready keys   ARGV[2…] one per record: since when it waits, unix seconds
-- Returns  how many were put
-- Atomic over the whole batch. Only tasks without a record, or whose record says that they wait in this queue; the
-- record's own time goes first.

local noted = 0
for i = 4, #KEYS do
  local key = KEYS[i]
  local record = redis.call('HMGET', key, 'state', 'tier', 'lane', 'ready_at_s')
  if not record[1] or (waits(record[1]) and ready_key(record[2], record[3]) == KEYS[3]) then
    redis.call('ZADD', KEYS[3], record[4] or ARGV[i - 2], id_of(key))
    noted = noted + 1
  end
end
return noted
