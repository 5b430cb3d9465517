-- Admit a whole group that was recorded elsewhere: it is closed from its first moment on.
-- KEYS    group scored live state dead
-- ARGV    cursor fingerprint prompt n min_group budget hard_cap max_dead version payload score payload score...
-- returns as `admit`
-- repeat  {0, c+1}: nothing is written twice
-- full    the first write is the big one, which a full server refuses before anything has changed
local s = redis.call('HMGET', KEYS[4], 'cursor', 'fp', 'held')
local c = tonumber(s[1] or '0')
if s[2] and s[2] ~= ARGV[2] then return {-2, c} end
if c ~= tonumber(ARGV[1]) then return {0, c} end
if redis.call('XLEN', KEYS[5]) >= tonumber(ARGV[8]) then return {-3, c} end
local live = redis.call('ZCARD', KEYS[3])
if live - tonumber(s[3] or '0') >= tonumber(ARGV[6]) or live >= tonumber(ARGV[7]) then return {-1, c} end
local fields = {'prompt', ARGV[3], 'n', ARGV[4], 'm', ARGV[5], 'left', 0, 'todo', 0, 'nx', 0, 'a', 1, 'st', 'closed',
  'v', ARGV[9]}
for k = 0, tonumber(ARGV[4]) - 1 do
  for i, letter in ipairs({'s:', 'r:'}) do
    fields[#fields + 1] = letter .. k
    fields[#fields + 1] = ARGV[9 + 2 * k + i]
  end
end
redis.call('HSET', KEYS[1], unpack(fields))
redis.call('HSET', KEYS[1], 'q', redis.call('XADD', KEYS[2], '*', 'g', ARGV[1]))
redis.call('ZADD', KEYS[3], ARGV[1], ARGV[1])
redis.call('HSET', KEYS[4], 'cursor', c + 1, 'fp', ARGV[2])
redis.call('HINCRBY', KEYS[4], 'admitted', 1)
return {1, c + 1}
