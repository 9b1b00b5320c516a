-- Makes a record for each task that waits for other tasks, unless what it waits for cannot come.
-- KEYS     accounts, away, then one task record each
-- ARGV[1]  start of the ready keys   ARGV[2], ARGV[3]  see admission.lua
-- ARGV[4…] two per key: its fields as admission.lua takes them; the ids of the tasks that it needs, apart by \31
-- Returns  one answer per task, apart by \30:
--            +waiting; +pending if all that it needs has succeeded; parked | late: | a state, as submit.lua
--            unknown | failed | cycle, each with the id of what it needs; after failed the state of that; apart by \31
-- Atomic over the whole batch; a record that exists is not touched. The records and sets of what it needs, and of what
-- those need, are found by their ids, so they cannot be named in KEYS.

local function leads_to(from, id)
  local open, seen = { from }, { [from] = true }
  while #open > 0 do
    local one = table.remove(open)
    if one == id then return true end
    for _, need in ipairs(redis.call('SMEMBERS', beside(task_key(one), 'needs'))) do
      if not seen[need] then
        seen[need] = true
        open[#open + 1] = need
      end
    end
  end
  return false
end

local function depend(key, text, list)
  local id, needs, open = id_of(key), {}, {}
  for need in string.gmatch(list, '[^\31]+') do needs[#needs + 1] = need end
  -- A task that nobody waits for closes no circle.
  local is_needed = redis.call('EXISTS', beside(key, 'dependents')) == 1
  for _, need in ipairs(needs) do
    if need == id or (is_needed and leads_to(need, id)) then return 'cycle' .. FIELD .. need end
  end
  local known = redis.call('HGET', key, 'state')
  if known then return known end
  for _, need in ipairs(needs) do
    local state = redis.call('HGET', task_key(need), 'state')
    if not state then return 'unknown' .. FIELD .. need end
    if state ~= 'success' then
      if END[state] then return 'failed' .. FIELD .. need .. FIELD .. state end
      open[#open + 1] = need
    end
  end
  if #open == 0 then return admit(key, text) end
  local answer = admit(key, text, nil, 'waiting')
  if answer ~= '+waiting' then return answer end
  redis.call('SADD', beside(key, 'needs'), unpack(open))
  redis.call('EXPIRE', beside(key, 'needs'), ARGV[2])
  for _, need in ipairs(open) do
    redis.call('SADD', beside(task_key(need), 'dependents'), id)
    redis.call('EXPIRE', beside(task_key(need), 'dependents'), ARGV[2])
  end
  return answer
end

local answers = {}
for i = 3, #KEYS do answers[i - 2] = depend(KEYS[i], ARGV[2 * i - 2], ARGV[2 * i - 1]) end
settle()
return table.concat(answers, RECORD)
