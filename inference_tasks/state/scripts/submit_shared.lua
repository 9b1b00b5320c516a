-- Makes a record for each task, or joins it to one that was submitted alike and is not over.
-- KEYS     accounts, away, then one task record each
-- ARGV[1]  start of the ready keys   ARGV[2], ARGV[3]  see admission.lua
-- ARGV[4…] for each task: its fields as admission.lua takes them; how many keys it has under which it is shared; then
--          four per key: the key (a string: id \31 print), seconds it is kept, seconds for which the result of an
--          equal task is handed out after its end, print of what was asked (empty: equal keys say that it is equal)
-- Returns  one answer per task, apart by \30:
--            +pending | parked | late: | a state, as submit.lua; conflict\31id: a task of that key was asked otherwise
--            =state\31id\311 if its message may not be stored yet, else 0\31tier that it should be lifted to, or empty
-- Atomic over the whole batch. Other records and keys are found by what the keys say, so they cannot be named in KEYS.
-- Who joins becomes a holder; the deadline is the latest of the holders', the wanted tier the highest.

local position = 4

local function joinable(id, print, reuse_s, known_print)
  local key = task_key(id)
  local record = redis.call('HMGET', key, 'state', 'cancel', 'finished_at_s', 'confirmed', 'tier', 'expires_at_s', 'token',
    'tier_wanted')
  local state = record[1]
  if not state then return nil end
  if END[state] then
    if state ~= 'success' or tonumber(record[3] or 0) + reuse_s <= tonumber(NOW) then return nil end
  elseif record[2] then
    return nil
  end
  if print ~= known_print then return key, nil end
  return key, record
end

local function join(key, id, record, text)
  local state = record[1]
  local tier, nonce, expires = string.match(text, '^[^\31]*\31([^\31]*)\31[^\31]*\31[^\31]*\31[^\31]*\31([^\31]*)\31([^\31]*)')
  local lift, is_unsure = '', false
  if not END[state] then
    expires = at(expires)
    hold(key, nonce, tier, expires, ARGV[2])
    local known = record[6] or ''
    if known ~= '' and (expires == '' or tonumber(expires) > tonumber(known)) then
      redis.call('HSET', key, 'expires_at_s', expires)
    end
    if (RANK[tier] or 0) > (RANK[record[8] or record[5]] or 0) then redis.call('HSET', key, 'tier_wanted', tier) end
    if (RANK[tier] or 0) > (RANK[record[5]] or 0) then lift = tier end
    is_unsure = state == 'pending' and not record[4] and not record[7]
  end
  return '=' .. state .. FIELD .. id .. FIELD .. (is_unsure and 1 or 0) .. FIELD .. lift
end

local function submit(key)
  local text, number = ARGV[position], tonumber(ARGV[position + 1])
  local first = position + 2
  position = first + 4 * number
  local state = redis.call('HGET', key, 'state')
  if state then return state end
  local id, answer = id_of(key), nil
  local free = {}
  for i = first, position - 1, 4 do
    local known_id, known_print = string.match(redis.call('GET', ARGV[i]) or '', '^([^\31]*)\31([^\31]*)$')
    local found, record
    if known_id then found, record = joinable(known_id, ARGV[i + 3], tonumber(ARGV[i + 2]), known_print) end
    if found and not record then return 'conflict' .. FIELD .. known_id end
    if not found then
      free[#free + 1] = i
    elseif not answer then
      id, answer = known_id, join(found, known_id, record, text)
    end
  end
  local names = {}
  for n, i in ipairs(free) do names[n] = ARGV[i] end
  if not answer then
    local tier, nonce, expires = string.match(text,
      '^[^\31]*\31([^\31]*)\31[^\31]*\31[^\31]*\31[^\31]*\31([^\31]*)\31([^\31]*)')
    answer = admit(key, text, { 'keys', table.concat(names, FIELD), 'tier_wanted', tier })
    if answer ~= '+pending' then return answer end
    hold(key, nonce, tier, at(expires), ARGV[2])
  end
  for _, i in ipairs(free) do redis.call('SET', ARGV[i], id .. FIELD .. ARGV[i + 3], 'EX', ARGV[i + 1]) end
  return answer
end

local answers = {}
for i = 3, #KEYS do answers[i - 2] = submit(KEYS[i]) end
settle()
return table.concat(answers, RECORD)
