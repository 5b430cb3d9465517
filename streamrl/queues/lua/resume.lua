-- The learner declares the checkpoint it goes on from: files of older epochs other than it are void.
-- KEYS    state scored
-- ARGV    nonce checkpoint epoch
-- returns 0 fenced; 1 set
-- repeat  the same
-- full    runs: it starts by freeing
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return 0 end
redis.call('XDEL', KEYS[2], '0-1')
redis.call('HSET', KEYS[1], 'base', ARGV[2], 'base_epoch', ARGV[3])
return 1
