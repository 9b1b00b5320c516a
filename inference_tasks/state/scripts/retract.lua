-- Takes back the records of one submission whose messages the broker refused.
-- KEYS     accounts, away, then one task record each
-- ARGV[1]  start of the ready keys   ARGV[2] nonce of the submission
-- Returns  how many records were deleted
-- Atomic over the whole batch. Only records that this submission made and that nobody has ever claimed go: a message
-- that was stored after all finds its record.

local deleted = 0
for i = 3, #KEYS do
  local key = KEYS[i]
  local record = redis.call('HMGET', key, 'state', 'nonce', 'token', 'tier_first', 'tier', 'lane')
  if record[1] == 'pending' and record[2] == ARGV[2] and not record[3] then
    redis.call('DEL', key)
    deleted = deleted + 1
    count(record[4], 'admitted', -1)
    count(record[4], 'pending', -1)
    departs(id_of(key), 'pending', record[5], record[6])
  end
end
settle()
return deleted
