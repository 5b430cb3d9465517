-- Add a server of a reward model to a run, or take one out. An added one gets the next number, which nobody reads now.
-- KEYS    servers
-- ARGV    name present(1|0)
-- returns 1 when that changed something, else 0
-- repeat  0
local known = redis.call('HGET', KEYS[1], ARGV[1])
local sign = ARGV[2] == '1' and '+' or '-'
if known and string.sub(known, 1, 1) == sign then return 0 end
local number = known and string.sub(known, 2) or '0'
if sign == '+' and number == '0' then number = redis.call('HINCRBY', KEYS[1], '#', 1) end
redis.call('HSET', KEYS[1], ARGV[1], sign .. number)
return 1
