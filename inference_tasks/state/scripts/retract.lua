-- Takes back the records of one submission whose messages the broker refused.
-- KEYS     accounts, away, then one task record each
-- ARGV[1]  start of the ready keys   ARGV[2] nonce of the submission   ARGV[3] why they were refused, to be counted;
--          empty where they were not
-- Returns  how many records were deleted
-- Atomic over the whole batch. Only records that this submission made, or was the last to hold, and that nobody has ever
-- claimed go: a message that was stored after all finds its record. With a shared task go the keys that lead to it.

local deleted = 0
for i = 3, #KEYS do
  local key = KEYS[i]
  local record = redis.call('HMGET', key, 'state', 'nonce', 'token', 'tier_first', 'tier', 'lane', 'keys')
  local is_last = record[2] == ARGV[2]
  if record[7] and not END[record[1]] then
    is_last = not is_held_by_others(key, ARGV[2])
    if not is_last then weigh(key) end
  end
  local state = record[1]
  if (state == 'pending' or state == 'waiting') and is_last and not record[3] then
    redis.call('DEL', key)
    clear(key)
    if record[7] then
      for name in string.gmatch(record[7], '[^\31]+') do
        if string.match(redis.call('GET', name) or '', '^[^\31]*') == id_of(key) then redis.call('DEL', name) end
      end
    end
    deleted = deleted + 1
    count(record[4], 'admitted', -1)
    if ARGV[3] ~= '' then count(record[4], 'refused:' .. ARGV[3], 1) end
    count(record[4], state, -1)
    departs(id_of(key), state, record[5], record[6])
  end
end
settle()
return deleted
