-- Say whether a role lives for the first time in its run.
-- KEYS    lives
-- ARGV    name nonce
-- returns 1 for the first life, which is known by its nonce, else 0
-- repeat  same reply
redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2])
return redis.call('HGET', KEYS[1], ARGV[1]) == ARGV[2] and 1 or 0
