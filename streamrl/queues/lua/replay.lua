-- Admit a dead group again, under a new attempt: nobody who worked on the old one can touch it. It leaves the queue of
-- replays, unless there is no room.
-- KEYS    dead group prompts live state replays
-- ARGV    entry gid budget hard_cap letter...     entry: the letter of the group; letter: those of its samples
-- returns 1 live again, letters removed; 0 there is no such letter; 2 live already, letters removed; 3 no prompt;
--         -1 no room
-- repeat  0
-- full    the first write is the big one, which a full server refuses before anything has changed
local e = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])
local f = {}
if e[1] then
  for i = 1, #e[1][2], 2 do f[e[1][2][i]] = e[1][2][i + 1] end
end
if f.g ~= ARGV[2] or f.k ~= '-1' then
  redis.call('HDEL', KEYS[6], ARGV[2])
  return 0
end
local known = redis.call('ZSCORE', KEYS[4], ARGV[2])
if not known then
  if not f.prompt then
    redis.call('HDEL', KEYS[6], ARGV[2])
    return 3
  end
  local live, s = redis.call('ZCARD', KEYS[4]), redis.call('HMGET', KEYS[5], 'held', 'version', 'whole')
  if live - tonumber(s[1] or '0') >= tonumber(ARGV[3]) or live >= tonumber(ARGV[4]) then return -1 end
  local a = tonumber(f.a) + 1
  redis.call('HSET', KEYS[2], 'prompt', f.prompt, 'n', f.n, 'm', f.m, 'left', f.n, 'todo', f.n, 'nx', 0, 'a', a,
    'st', 'open', 'v', s[2] or f.v or '0') -- held-out groups have no newest version: they stay in their round
  if s[3] then redis.call('HSET', KEYS[2], 'whole', 1) end
  redis.call('HSET', KEYS[2], 'p', redis.call('XADD', KEYS[3], '*', 'g', ARGV[2], 'a', a))
  redis.call('ZADD', KEYS[4], ARGV[2], ARGV[2])
  redis.call('HINCRBY', KEYS[5], 'replayed', 1)
end
redis.call('HDEL', KEYS[6], ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[1])
for i = 5, #ARGV do redis.call('XDEL', KEYS[1], ARGV[i]) end
return known and 2 or 1
