-- Delete groups whose update a durable checkpoint holds.
-- KEYS    state scored live group...
-- ARGV    nonce checkpoint held gid...       at most 500 groups; held: trained groups still here after all chunks
-- returns -1 fenced, else the number deleted now
-- repeat  deletes nothing twice: the gate of each group is the removal of its entry in `scored`
-- full    runs: it starts by freeing. The checkpoint is named before the first group is deleted
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return -1 end
redis.call('XDEL', KEYS[2], '0-1')
redis.call('HSET', KEYS[1], 'ckpt', ARGV[2], 'held', ARGV[3])
local n = 0
for i = 4, #KEYS do
  local q = redis.call('HGET', KEYS[i], 'q')
  if q and redis.call('XDEL', KEYS[2], q) == 1 then
    redis.call('UNLINK', KEYS[i])
    redis.call('ZREM', KEYS[3], ARGV[i])
    n = n + 1
  end
end
redis.call('HINCRBY', KEYS[1], 'retired', n)
return n
