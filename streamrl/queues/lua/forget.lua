-- Remove the entry of a leased sample when there is nothing left to score.
-- KEYS    rollouts group
-- ARGV    entry k attempt
-- returns 1 removed; 0 the sample is waiting for its score (nothing is written), or the entry was gone
-- repeat  0
local h = redis.call('HMGET', KEYS[2], 'st', 'a', 's:' .. ARGV[2], 'r:' .. ARGV[2], 'x:' .. ARGV[2])
if h[1] == 'open' and h[2] == ARGV[3] and h[3] and not h[4] and not h[5] then return 0 end
redis.call('XACK', KEYS[1], 'g', ARGV[1])
return redis.call('XDEL', KEYS[1], ARGV[1])
