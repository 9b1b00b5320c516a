-- Reads one dead letter, and how many there are.
-- KEYS     dead letters in their order, dead letters
-- ARGV[1]  id; empty to count only
-- Returns  how many there are; the letter as dead_letters.lua gives it, empty if there is none
-- Atomic; changes nothing.

return { redis.call('ZCARD', KEYS[1]), ARGV[1] ~= '' and redis.call('HGET', KEYS[2], ARGV[1]) or '' }
