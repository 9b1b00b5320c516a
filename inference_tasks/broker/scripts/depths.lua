-- Counts waiting messages.
-- ARGV     queues
-- Returns  per queue how many can be fetched
-- Atomic: one moment for all queues.

local depths = {}
for i = 1, #ARGV do depths[i] = depth(ARGV[i]) end
return depths
