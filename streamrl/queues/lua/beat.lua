-- Write the heartbeat of a role: all fields anew, with a time to live.
-- KEYS    role roles [hosts]
-- ARGV    name ttl_ms life up_ms field value...       life: `host name start` of the process, which beats for up_ms now
-- returns 1
-- repeat  the same
-- full    runs: it starts by freeing
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], unpack(ARGV, 5))
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('SADD', KEYS[2], ARGV[1])
if KEYS[3] then
  local t = redis.call('TIME')
  local now = t[1] * 1000 + math.floor(t[2] / 1000)
  redis.call('HSET', KEYS[3], ARGV[3], now - ARGV[4] .. ' ' .. now)
end
return 1
