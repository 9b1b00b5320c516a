-- Takes tasks out of a queue's index that do not belong there: without a record, or not waiting in this queue.
-- KEYS     accounts, away, the queue's index, then one task record each
-- ARGV[1]  start of the ready keys
-- Returns  how many were taken out
-- Atomic over the whole batch. A task whose record says that it waits in this queue stays.

local forgotten = 0
for i = 4, #KEYS do
  local key = KEYS[i]
  local record = redis.call('HMGET', key, 'state', 'tier', 'lane')
  if not (record[1] and waits(record[1]) and ready_key(record[2], record[3]) == KEYS[3]) then
    forgotten = forgotten + redis.call('ZREM', KEYS[3], id_of(key))
  end
end
return forgotten
