-- The learner says what became of a request to go back: shown, done or refused, with a version or a reason.
-- KEYS    state scored
-- ARGV    nonce id answer text
-- returns 0 fenced; 1 set
-- repeat  the same
-- full    runs: it starts by freeing
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return 0 end
redis.call('XDEL', KEYS[2], '0-1')
redis.call('HSET', KEYS[1], 'rolled', ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. ARGV[4])
return 1
