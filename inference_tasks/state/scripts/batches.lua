-- Read after ledger.lua, before the scripts in which tasks end; never run alone.
-- Keeps how each line of a batch has ended: a letter at the line's place, so that a task that ends twice (a replay lies
-- between) counts once. Only tasks whose ids begin so belong to batches: all others cost one look at their key.

local LETTER = { success = 's', failed = 'f', cancelled = 'c', expired = 'e', dropped = 'd' }
local NAME = { s = 'success', f = 'failed', c = 'cancelled', e = 'expired', d = 'dropped' }

local function batch_key(batch_id, part) return string.sub(ACCOUNTS, 1, -9) .. '{' .. batch_id .. '}:' .. part end

local function mark_line(batch_id, at, how)
  local counts, states = batch_key(batch_id, 'batch'), batch_key(batch_id, 'states')
  if redis.call('EXISTS', counts) == 0 then return end
  local before = redis.call('GETRANGE', states, at, at)
  if before == LETTER[how] then return end
  redis.call('SETRANGE', states, at, LETTER[how])
  if NAME[before] then redis.call('HINCRBY', counts, NAME[before], -1) end
  redis.call('HINCRBY', counts, how, 1)
end

local function mark_in_batches(key, how)
  if string.sub(key, ID_FROM, ID_FROM + 5) ~= 'batch-' then return end
  local places = beside(key, 'batches')
  for _, place in ipairs(redis.call('SMEMBERS', places)) do
    local batch_id, at = string.match(place, '^(.*)|(%d+)$')
    mark_line(batch_id, at, how)
  end
  -- A failed one may be replayed, and end once more.
  if how ~= 'failed' then redis.call('DEL', places) end
end

