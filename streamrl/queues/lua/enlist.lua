-- Add a server of a reward model to a run, or take one out.
-- KEYS    servers
-- ARGV    name present(1|0)
-- returns 1 when that changed something, else 0
-- repeat  0
local known, sign = redis.call('HGET', KEYS[1], ARGV[1]), ARGV[2] == '1' and '+' or '-'
if known and string.sub(known, 1, 1) == sign then return 0 end  -- an old run has a number behind it
redis.call('HSET', KEYS[1], ARGV[1], sign)
return 1
