-- The learner gives the shared devices back to the engines.
-- KEYS    turn
-- ARGV    nonce
-- returns 1; 0: they are held by another learner
-- repeat  the same
-- full    runs: it only frees
local holder = redis.call('HGET', KEYS[1], 'holder')
if holder and holder ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
return 1
