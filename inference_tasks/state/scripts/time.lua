-- Tells the time by which records are kept.
-- KEYS     none
-- ARGV     none
-- Returns  unix seconds, as text
-- Changes nothing.

return moment((clock()))
