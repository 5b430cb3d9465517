-- An engine has given back the devices that it shares with the learner.
-- KEYS    engines
-- ARGV    name
-- returns 1
-- repeat  the same
-- full    runs: it only frees
redis.call('ZREM', KEYS[1], ARGV[1])
return 1
