-- Notes that an operator has taken dead letters out of their queue for good.
-- KEYS     accounts, away, dead letters in their order, dead letters, then one task record each
-- ARGV[1]  start of the ready keys
-- Returns  nothing
-- Atomic over the whole batch. Their tasks count as dropped by an operator, within failed.

for i = 5, #KEYS do
  local key = KEYS[i]
  local counted_under, kind = unearth(KEYS[3], KEYS[4], id_of(key))
  local record = redis.call('HMGET', key, 'state', 'tier_first', 'dead')
  if record[1] then
    counted_under, kind = record[2], record[1] == 'failed' and record[3] or ''
    if kind ~= '' then redis.call('HSET', key, 'dead', 'dropped') end
  end
  if kind and kind ~= '' then
    count(counted_under, 'dead:' .. kind, -1)
    count(counted_under, 'dead:dropped', 1)
  end
end
settle()
