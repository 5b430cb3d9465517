-- Remove the entry of a leased sample, or of a whole group, when there is nothing left to score.
-- KEYS    rollouts group
-- ARGV    entry k attempt       k: number of the sample, * for the group
-- returns 1 removed; 0 the sample or the group is waiting for its score (nothing is written), or the entry was gone
-- repeat  0
local h = redis.call('HMGET', KEYS[2], 'st', 'a', 'whole', 's:' .. ARGV[2], 'r:' .. ARGV[2], 'x:' .. ARGV[2])
local waits = h[3]
if ARGV[2] ~= '*' then waits = not h[3] and h[4] and not h[5] and not h[6] end
if h[1] == 'open' and h[2] == ARGV[3] and waits then return 0 end
redis.call('XACK', KEYS[1], 'g', ARGV[1])
return redis.call('XDEL', KEYS[1], ARGV[1])
