-- The learner asks for the devices that it shares with the engines, and renews its hold on them.
-- KEYS    turn engines
-- ARGV    nonce ttl_ms
-- returns how many engines still use them: with 0 they are the learner's; -1: another learner asks or holds
-- repeat  the same
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local held = redis.call('HMGET', KEYS[1], 'holder', 'until')
if held[1] and held[1] ~= ARGV[1] and tonumber(held[2]) > now then return -1 end
redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'until', now + ARGV[2])
return redis.call('ZCARD', KEYS[2])
