-- A person asks the learner to go back to the weights of an earlier version; a newer request takes the older one's place.
-- KEYS    state
-- ARGV    id epoch version
-- returns 1
-- repeat  the same: the learner knows a request by its id
redis.call('HSET', KEYS[1], 'rollback', ARGV[1] .. ' ' .. ARGV[2] .. ' ' .. ARGV[3])
return 1
