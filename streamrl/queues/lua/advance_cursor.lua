-- Advance the cursor of a Redis that lost its data: all groups below it were trained (held-out ones: evaluated).
-- KEYS    state scored
-- ARGV    nonce cursor
-- returns 0 fenced; 1 the cursor is there or above
-- repeat  the same
-- full    runs: it starts by freeing
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return 0 end
redis.call('XDEL', KEYS[2], '0-1')
if tonumber(redis.call('HGET', KEYS[1], 'cursor') or '0') < tonumber(ARGV[2]) then
  redis.call('HSET', KEYS[1], 'cursor', ARGV[2])
end
return 1
