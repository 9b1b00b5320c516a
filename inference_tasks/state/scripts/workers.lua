-- Reads the heartbeats of the live workers.
-- KEYS     the live workers
-- ARGV[1]  what the key of a heartbeat begins with; the node's name follows
-- Returns  node, time last seen (unix seconds), heartbeat (JSON), node, … as a list, by name
-- Changes nothing. The heartbeats' keys are found in the set, so they cannot be named in KEYS.

local found = {}
local nodes = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
for i = 1, #nodes, 2 do
  local beat = redis.call('GET', ARGV[1] .. nodes[i])
  if beat then
    found[#found + 1] = nodes[i]
    found[#found + 1] = nodes[i + 1]
    found[#found + 1] = beat
  end
end
return found
