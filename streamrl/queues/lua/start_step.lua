-- A step begins with these groups: count it, so that a group that kills the learner is found.
-- KEYS    state scored group...
-- ARGV    nonce
-- returns 0 fenced; 1 counted
-- repeat  no change: a group counts once per nonce, that is, per learner process
-- full    runs: it starts by freeing
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return 0 end
redis.call('XDEL', KEYS[2], '0-1')
for i = 3, #KEYS do
  local h = redis.call('HMGET', KEYS[i], 'st', 'tn')
  if h[1] == 'closed' and h[2] ~= ARGV[1] then
    redis.call('HINCRBY', KEYS[i], 't', 1)
    redis.call('HSET', KEYS[i], 'tn', ARGV[1])
  end
end
return 1
