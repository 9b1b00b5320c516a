-- Makes a record for each task that has none.
-- KEYS     one task record each
-- ARGV[1]  lifetime of an unfinished record, seconds
-- ARGV[2…] one per key, fields apart by \31: name, tier, tier_first, lane, generation, nonce,
--          expires_at_s: empty, unix seconds, or +seconds from now
-- Returns  the states apart by \30, each with + before it where this call made the record
-- Atomic over the whole batch; a record that exists is not touched.

local now = moment((clock()))
local ttl_s = ARGV[1]
local answers = {}
for i = 1, #KEYS do
  local key = KEYS[i]
  local state = redis.call('HGET', key, 'state')
  if state then
    answers[i] = state
  else
    local name, tier, tier_first, lane, generation, nonce, expires = string.match(ARGV[i + 1],
      '^([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)$')
    if string.byte(expires) == 43 then expires = moment(now + string.sub(expires, 2)) end
    redis.call('HSET', key, 'state', 'pending', 'name', name, 'tier', tier, 'tier_first', tier_first, 'lane', lane,
      'generation', generation, 'nonce', nonce, 'submitted_at_s', now, 'expires_at_s', expires)
    redis.call('EXPIRE', key, ttl_s)
    answers[i] = '+pending'
  end
end
return table.concat(answers, RECORD)
