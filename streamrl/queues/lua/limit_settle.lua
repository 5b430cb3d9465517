-- A request leaves the line of a rate limit, or says what it needed of what it took: the rest comes back, more is owed.
-- KEYS    limit waiting granted
-- ARGV    id request_ms tokens_ms       what comes back to either bucket; below 0: what is owed
-- returns 2 it left the line, and had taken nothing; 1 settled; 0 there is no such request
-- repeat  0: the gate is its removal
-- full    runs: it starts by freeing
if redis.call('ZREM', KEYS[2], ARGV[1]) == 1 then return 2 end
if redis.call('ZREM', KEYS[3], ARGV[1]) == 0 then return 0 end
redis.call('HINCRBYFLOAT', KEYS[1], 'requests', ARGV[2])
redis.call('HINCRBYFLOAT', KEYS[1], 'tokens', ARGV[3])
return 1
