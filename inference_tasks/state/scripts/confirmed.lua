-- Notes that the broker has stored the messages of shared tasks: who joins them needs no message of his own.
-- KEYS     one task record each
-- ARGV     none
-- Returns  nothing
-- Atomic over the whole batch; a record that is gone is not made.

for i = 1, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then redis.call('HSET', KEYS[i], 'confirmed', 1) end
end
