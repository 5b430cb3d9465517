-- Write the heartbeat of a role: all fields anew, with a time to live.
-- KEYS    role roles
-- ARGV    name ttl_ms field value...
-- returns 1
-- repeat  the same
-- full    runs: it starts by freeing
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('SADD', KEYS[2], ARGV[1])
return 1
