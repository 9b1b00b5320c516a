-- Adds lines to a batch, once their tasks have been accepted.
-- KEYS     accounts, away, batch, its lines, its states, then one task record each
-- ARGV[1]  start of the ready keys   ARGV[2] id of the batch   ARGV[3] lifetime of what is kept of it, seconds
-- ARGV[4…] one per record: what the batch keeps of the line
-- Returns  1, or 0 if there is no such batch
-- Atomic over all lines: a task that has ended by now is counted here, any other when it ends.

if redis.call('EXISTS', KEYS[3]) == 0 then return 0 end
for i = 6, #KEYS do
  local key = KEYS[i]
  local at = redis.call('RPUSH', KEYS[4], ARGV[i - 2]) - 1
  local state = redis.call('HGET', key, 'state')
  if END[state] then mark_line(ARGV[2], at, state) end
  if not END[state] or state == 'failed' then
    redis.call('SADD', beside(key, 'batches'), ARGV[2] .. '|' .. at)
    redis.call('EXPIRE', beside(key, 'batches'), ARGV[3])
  end
end
redis.call('HINCRBY', KEYS[3], 'accepted', #KEYS - 5)
for i = 3, 5 do redis.call('EXPIRE', KEYS[i], ARGV[3]) end
return 1
