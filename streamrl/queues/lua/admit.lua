-- Admit one prompt group: its id is the cursor of the data set, so a repeat can be told from a second group.
-- KEYS    group prompts live state dead
-- ARGV    cursor fingerprint prompt n min_group budget hard_cap max_dead version
-- returns {1, c+1} admitted; {0, c} the cursor is at c; {-1, c} no room; {-2, c} other data;
--         {-3, c} too many dead letters
-- repeat  {0, c+1}: nothing is written twice
-- full    the first write is the big one, which a full server refuses before anything has changed
local s = redis.call('HMGET', KEYS[4], 'cursor', 'fp', 'held', 'whole')
local c = tonumber(s[1] or '0')
if s[2] and s[2] ~= ARGV[2] then return {-2, c} end
if c ~= tonumber(ARGV[1]) then return {0, c} end
if redis.call('XLEN', KEYS[5]) >= tonumber(ARGV[8]) then return {-3, c} end
local live = redis.call('ZCARD', KEYS[3])
if live - tonumber(s[3] or '0') >= tonumber(ARGV[6]) or live >= tonumber(ARGV[7]) then return {-1, c} end
redis.call('HSET', KEYS[1], 'prompt', ARGV[3], 'n', ARGV[4], 'm', ARGV[5], 'left', ARGV[4], 'todo', ARGV[4], 'nx', 0,
  'a', 1, 'st', 'open', 'v', ARGV[9])
if s[4] then redis.call('HSET', KEYS[1], 'whole', 1) end
local p = redis.call('XADD', KEYS[2], '*', 'g', ARGV[1], 'a', 1)
redis.call('HSET', KEYS[1], 'p', p)
redis.call('ZADD', KEYS[3], ARGV[1], ARGV[1])
redis.call('HSET', KEYS[4], 'cursor', c + 1, 'fp', ARGV[2])
redis.call('HINCRBY', KEYS[4], 'admitted', 1)
return {1, c + 1}
