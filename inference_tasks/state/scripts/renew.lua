-- Extends the leases of all running tasks of a worker, and notes that the worker is alive.
-- KEYS     accounts, away, the live workers, this worker's heartbeat, then one task record each
-- ARGV[1]  start of the ready keys
-- ARGV[2]  worker   ARGV[3] lease, seconds   ARGV[4] lifetime of an unfinished record, seconds
-- ARGV[5]  heartbeat (JSON), empty for none
-- ARGV[6…] two per task: token; the message's fields as claim.lua takes them
-- Returns  the positions (from 1) of the tasks whose claim is lost, apart by \30; then, after a \31, those of the tasks
--          that are asked to stop, with a ! behind those that are to be terminated; then, after a \31, the switches:
--          target, JSON, target, … apart by \30
-- Atomic over the whole batch. A record that is missing, or was made anew by a submit since, is taken up again.

local now = clock()
local worker, lease_s = ARGV[2], ARGV[3]
local held_until = moment(now + lease_s)
local lost, stopping = {}, {}

for i = 1, #KEYS - 4 do
  local key, token = KEYS[i + 4], ARGV[4 + 2 * i]
  local record = redis.call('HMGET', key, 'state', 'token', 'attempts', 'held_until_s', 'tier_first', 'tier', 'lane',
    'hop', 'cancel')
  local state = record[1]
  local known_token = tonumber(record[2]) or 0
  local is_held = state == 'processing' and (tonumber(record[4]) or 0) > now
  if state == 'processing' and record[2] == token then
    redis.call('HSET', key, 'held_until_s', held_until)
    if record[9] then stopping[#stopping + 1] = record[9] == 'terminate' and i .. '!' or i end
  elseif not state or (not END[state] and not is_held and known_token < tonumber(token)) then
    local generation, tier, lane, crash_limit, hop, rest = string.match(ARGV[5 + 2 * i],
      '^([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31()')
    local tier_first = record[5]
    if not state then
      local first, _, name, submitted, expires, tenant = described(ARGV[5 + 2 * i], rest)
      tier_first = first
      local since = tonumber(submitted) and tonumber(submitted) < now and submitted or moment(now)
      redis.call('HSET', key, 'name', name, 'tier', tier, 'tier_first', tier_first, 'lane', lane,
        'generation', generation, 'submitted_at_s', submitted, 'expires_at_s', expires, 'ready_at_s', since)
      if tenant ~= '' then redis.call('HSET', key, 'tenant', tenant) end
      if crash_limit ~= '' then redis.call('HSET', key, 'crash_limit', crash_limit) end
      unlist(id_of(key), ready_key(tier, lane))
    elseif waits(state) or state == 'waiting' then
      departs(id_of(key), state, record[6], record[7])
      redis.call('HDEL', key, 'due_at_s')
    end
    if tonumber(hop) > tonumber(record[8] or 0) then redis.call('HSET', key, 'hop', hop) end
    redis.call('HSET', key, 'state', 'processing', 'token', token, 'worker', worker, 'held_until_s', held_until,
      'started_at_s', moment(now), 'attempts', math.max(1, tonumber(record[3]) or 0))
    redis.call('EXPIRE', key, ARGV[4])
    moved(tier_first, state or nil, 'processing')
  else
    lost[#lost + 1] = i
  end
end

if ARGV[5] ~= '' then
  redis.call('SET', KEYS[4], ARGV[5], 'EX', math.ceil(lease_s))
  redis.call('ZADD', KEYS[3], moment(now), worker)
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', moment(now - 10 * lease_s))
  redis.call('EXPIRE', KEYS[3], math.ceil(10 * lease_s))
end
settle()
local switched = redis.call('HGETALL', switches_key())
return table.concat(lost, RECORD) .. FIELD .. table.concat(stopping, RECORD) .. FIELD .. table.concat(switched, RECORD)
