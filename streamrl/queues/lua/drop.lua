-- Drop a closed group untrained, and remember its id (one bit) by reason.
-- KEYS    state scored live dropped dropped_for_reason group
-- ARGV    nonce gid why
-- returns -1 fenced; 0 not closed, or gone; 1 dropped
-- repeat  0
-- full    runs: it starts by freeing
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return -1 end
local q = redis.call('HGET', KEYS[6], 'q')
if not q or redis.call('XDEL', KEYS[2], q) == 0 then return 0 end
redis.call('UNLINK', KEYS[6])
redis.call('ZREM', KEYS[3], ARGV[2])
redis.call('SETBIT', KEYS[4], ARGV[2], 1)
redis.call('SETBIT', KEYS[5], ARGV[2], 1)
redis.call('HINCRBY', KEYS[1], 'dropped', 1)
redis.call('HINCRBY', KEYS[1], 'dropped:' .. ARGV[3], 1)
return 1
