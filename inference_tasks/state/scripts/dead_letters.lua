-- Reads dead letters by their time of death.
-- KEYS     dead letters in their order, dead letters
-- ARGV[1]  1 for the newest first, else 0   ARGV[2] how many are passed over   ARGV[3] how many are read at most
-- Returns  the letters as a list, each: first tier and kind that it counts under, JSON, apart by \31
-- Atomic; changes nothing.

local command = ARGV[1] == '1' and 'ZREVRANGE' or 'ZRANGE'
local ids = redis.call(command, KEYS[1], ARGV[2], ARGV[2] + ARGV[3] - 1)
local letters = {}
for i = 1, #ids do letters[i] = redis.call('HGET', KEYS[2], ids[i]) end
return letters
