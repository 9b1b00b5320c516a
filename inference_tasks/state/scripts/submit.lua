-- Makes a record for each task that has none.
-- KEYS     accounts, away, then one task record each
-- ARGV[1]  start of the ready keys   ARGV[2], ARGV[3]  see admission.lua
-- ARGV[4…] one per key: its fields as admission.lua takes them
-- Returns  the states apart by \30, each with + before it where this call made the record; "parked" where none was
--          made because the tier has as much work away as its bound; "paused" because an operator wants none; "late:" and a number where so many wait before it
-- Atomic over the whole batch, which counts towards bound and number itself; a record that exists is not touched.

local answers = {}
for i = 3, #KEYS do
  answers[i - 2] = redis.call('HGET', KEYS[i], 'state') or admit(KEYS[i], ARGV[i + 1])
end
settle()
return table.concat(answers, RECORD)
