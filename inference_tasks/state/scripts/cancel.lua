-- Cancels tasks: what waits ends here and now, what runs is asked to stop.
-- KEYS     accounts, away, then one task record each; the Celery result beside each is written where the task ends
-- ARGV[1]  start of the ready keys   ARGV[2] lifetime of a finished record, seconds
-- ARGV[3]  stop, or terminate: how those that run are asked; the stronger word stays
-- ARGV[4…] one per record: the nonce of the submit that gives up its share in the task; empty to end it for all
-- Returns  for each cancelled | asked | left (others hold it: it goes on) | ended (before) | missing, apart by \30
-- Atomic over the whole batch. A run whose lease is over is ended too: whatever it may write yet is refused.

local now = clock()
local answers = {}

local function cancel(key, holder)
  local record = redis.call('HMGET', key, 'state', 'tier', 'lane', 'tier_first', 'held_until_s', 'cancel')
  local state = record[1]
  if not state then return 'missing' end
  if END[state] then return 'ended' end
  if holder ~= '' and is_held_by_others(key, holder) then
    weigh(key)
    return 'left'
  end
  if state == 'processing' and (tonumber(record[5]) or 0) > now then
    if record[6] ~= 'terminate' then redis.call('HSET', key, 'cancel', ARGV[3]) end
    return 'asked'
  end
  departs(id_of(key), state, record[2], record[3])
  end_cancelled(key, ARGV[2], id_of(key), now)
  moved(record[4], state, 'cancelled')
  tell(key, 'cancelled', ARGV[2], now)
  return 'cancelled'
end

for i = 3, #KEYS do answers[i - 2] = cancel(KEYS[i], ARGV[i + 1]) end
settle()
return table.concat(answers, RECORD)
