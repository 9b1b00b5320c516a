-- Notes messages that lie in the dead-letter queue.
-- KEYS     accounts, away, dead letters in their order, dead letters, then one task record each
-- ARGV[1]  start of the ready keys
-- ARGV[2…] two per record: generation, kind (replayable or unfit), time of death, apart by \31; the letter as JSON
-- Returns  nothing
-- Atomic over the whole batch; a letter of a later generation is not replaced. A failed task of this generation counts
-- under the kind from now on. A letter without such a record is in the index only, unless it counted before.

for i = 5, #KEYS do
  local key, id = KEYS[i], id_of(KEYS[i])
  local generation, kind, dead_at = string.match(ARGV[2 * i - 8], '^([^\31]*)\31([^\31]*)\31([^\31]*)$')
  local json = ARGV[2 * i - 7]
  local record = redis.call('HMGET', key, 'state', 'generation', 'tier_first', 'dead')
  local stored = redis.call('HGET', KEYS[4], id)
  local counted_under, counted_as, known = '', '', nil
  if stored then
    local old
    counted_under, counted_as, old = string.match(stored, '^([^\31]*)\31([^\31]*)\31(.*)$')
    known = cjson.decode(old).generation
  end
  if not known or known <= tonumber(generation) then
    if record[1] == 'failed' and record[2] == generation then
      counted_under, counted_as = record[3], record[4] or ''
      redis.call('HSET', key, 'dead', kind)
      if counted_as ~= '' then count(counted_under, 'dead:' .. counted_as, -1) end
      counted_as = kind
      count(counted_under, 'dead:' .. kind, 1)
    elseif record[1] then
      counted_under, counted_as = '', ''
    elseif counted_as ~= '' then
      count(counted_under, 'dead:' .. counted_as, -1)
      counted_as = kind
      count(counted_under, 'dead:' .. kind, 1)
    end
    redis.call('ZADD', KEYS[3], dead_at, id)
    redis.call('HSET', KEYS[4], id, counted_under .. FIELD .. counted_as .. FIELD .. json)
  end
end
settle()
