-- Extends the leases of all running tasks of a worker, and notes that the worker is alive.
-- KEYS     the live workers, this worker's heartbeat, then one task record each
-- ARGV[1]  worker   ARGV[2] lease, seconds   ARGV[3] lifetime of an unfinished record, seconds
-- ARGV[4]  heartbeat (JSON), empty for none
-- ARGV[5…] two per task: token; the message's fields as claim.lua takes them
-- Returns  the positions (from 1) of the tasks whose claim is lost, apart by \30
-- Atomic over the whole batch. A record that is missing, or was made anew by a submit since, is taken up again.

local now = clock()
local worker, lease_s = ARGV[1], ARGV[2]
local held_until = moment(now + lease_s)
local lost = {}

for i = 1, #KEYS - 2 do
  local key, token = KEYS[i + 2], ARGV[3 + 2 * i]
  local record = redis.call('HMGET', key, 'state', 'token', 'attempts', 'held_until_s')
  local state = record[1]
  local known_token = tonumber(record[2]) or 0
  local is_held = state == 'processing' and (tonumber(record[4]) or 0) > now
  if state == 'processing' and record[2] == token then
    redis.call('HSET', key, 'held_until_s', held_until)
  elseif not state or (not END[state] and not is_held and known_token < tonumber(token)) then
    if not state then
      local generation, tier, lane, crash_limit, rest = string.match(ARGV[4 + 2 * i],
        '^([^\31]*)\31([^\31]*)\31([^\31]*)\31([^\31]*)\31()')
      local tier_first, _, name, submitted, expires = described(ARGV[4 + 2 * i], rest)
      redis.call('HSET', key, 'name', name, 'tier', tier, 'tier_first', tier_first, 'lane', lane,
        'generation', generation, 'submitted_at_s', submitted, 'expires_at_s', expires)
      if crash_limit ~= '' then redis.call('HSET', key, 'crash_limit', crash_limit) end
    end
    redis.call('HSET', key, 'state', 'processing', 'token', token, 'worker', worker, 'held_until_s', held_until,
      'started_at_s', moment(now), 'attempts', math.max(1, tonumber(record[3]) or 0))
    redis.call('EXPIRE', key, ARGV[3])
  else
    lost[#lost + 1] = i
  end
end

if ARGV[4] ~= '' then
  redis.call('SET', KEYS[2], ARGV[4], 'EX', math.ceil(lease_s))
  redis.call('ZADD', KEYS[1], moment(now), worker)
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', moment(now - 10 * lease_s))
  redis.call('EXPIRE', KEYS[1], math.ceil(10 * lease_s))
end
return table.concat(lost, RECORD)
