-- Notes something that an operator did.
-- KEYS     the operator log
-- ARGV     action; target; by whom; why; how many lines the log keeps
-- Returns  nothing
-- Atomic.

note_operator(KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5])
