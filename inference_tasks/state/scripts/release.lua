-- Gives back claims: as if they had not been made, but for the token, which never shrinks.
-- KEYS     one task record each
-- ARGV     one per key: the claim's token; then how many attempts are taken back: 1 if the runs never started, else 0
-- Returns  nothing
-- Atomic over the whole batch; a claim that is over, or not of this token, is not touched.

for i = 1, #KEYS do
  local record = redis.call('HMGET', KEYS[i], 'state', 'token', 'attempts')
  if record[1] == 'processing' and record[2] == ARGV[i] then
    redis.call('HSET', KEYS[i], 'state', 'pending', 'attempts', record[3] - ARGV[#KEYS + 1])
    redis.call('HDEL', KEYS[i], 'held_until_s', 'worker', 'started_at_s')
  end
end
