-- Reads all that tells why a task is where it is.
-- KEYS     its record, the switches, the live workers, the dead letters, then the ready index of each queue
-- ARGV[1]  its id   ARGV[2] what the key of a heartbeat begins with   ARGV[3] how many of the tasks that it waits for
--          are looked at   ARGV[4…] the names of the wanted fields of the record
-- Returns  an empty list if there is no record; else as lists: the record, as a line of get.lua; the time (unix seconds);
--          switches: target, JSON, …; heartbeats: node, last seen, JSON, …; its dead letter as bury.lua keeps it, empty for
--          none; for each queue: how many wait in it by now, how many of these before the task (-1 if it is not listed
--          there); tasks that it waits for: id, state, …
-- Atomic; changes nothing. Heartbeats and other tasks are found by what the keys say, so they cannot be named in KEYS.

local id, now = ARGV[1], moment((clock()))
local fields = {}
for i = 4, #ARGV do fields[i - 3] = ARGV[i] end
local record = redis.call('HMGET', KEYS[1], unpack(fields))
if not record[1] then return {} end
local waits_for = record[1] == 'waiting' and redis.call('SMEMBERS', beside(KEYS[1], 'needs')) or {}
for i = 1, #fields do record[i] = record[i] or '' end
record[#fields + 1] = table.concat(waits_for, '\29')

local beats = {}
local nodes = redis.call('ZRANGE', KEYS[3], 0, -1, 'WITHSCORES')
for i = 1, #nodes, 2 do
  local beat = redis.call('GET', ARGV[2] .. nodes[i])
  if beat then
    for _, one in ipairs({ nodes[i], nodes[i + 1], beat }) do beats[#beats + 1] = one end
  end
end

local queues = {}
for i = 5, #KEYS do
  queues[#queues + 1] = redis.call('ZCOUNT', KEYS[i], '-inf', now)
  queues[#queues + 1] = redis.call('ZRANK', KEYS[i], id) or -1
end

local needs = {}
local prefix = string.sub(KEYS[1], 1, -#id - 8)
for i = 1, math.min(#waits_for, tonumber(ARGV[3])) do
  needs[#needs + 1] = waits_for[i]
  needs[#needs + 1] = redis.call('HGET', prefix .. '{' .. waits_for[i] .. '}:task', 'state') or ''
end

return {
  table.concat(record, FIELD), now, redis.call('HGETALL', KEYS[2]), beats, redis.call('HGET', KEYS[4], id) or '', queues,
  needs
}
