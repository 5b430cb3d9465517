-- Reward workers say how they score: whole groups, or samples one by one. Groups admitted from now on are put up so.
-- KEYS    state scored
-- ARGV    whole(1|0)
-- returns 1
-- repeat  the same
-- full    runs: it starts by freeing
redis.call('XDEL', KEYS[2], '0-1')
if ARGV[1] == '1' then redis.call('HSET', KEYS[1], 'whole', 1) else redis.call('HDEL', KEYS[1], 'whole') end
return 1
