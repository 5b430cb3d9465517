-- An engine asks whether it may use the devices that it shares with the learner, and renews its use of them.
-- KEYS    turn engines
-- ARGV    name ttl_ms on_devices       on_devices: 1 when the engine is on them now, 0 when it wants to be
-- returns 1: it may; 0: the learner asks for them or has them. An engine that is on them is noted as using them until it
--         leaves or its lease ends, whatever the answer, also by a Redis that came back from before it was noted
-- repeat  the same
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local free = tonumber(redis.call('HGET', KEYS[1], 'until') or '0') <= now
if free or ARGV[3] == '1' then redis.call('ZADD', KEYS[2], now + ARGV[2], ARGV[1]) end
return free and 1 or 0
