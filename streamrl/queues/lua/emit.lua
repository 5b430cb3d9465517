-- Write the payload of one sample and put it up for scoring; its journal goes. Any holder may emit: the first wins.
-- include _drop_journal _innocent
-- KEYS    group prompts rollouts
-- ARGV    gid k attempt payload entry
-- returns 1 written; 0 there is a payload or a cause of death; -1 the group is gone, closed or on another attempt
--         (the caller's entry is removed when it is not the group's own). The last missing sample removes the prompt's
--         entry, and puts up a group that is scored whole
-- repeat  0 or -1: nothing is written twice, and a zombie cannot bring a retired group back
-- full    the first write is the payload, which a full server refuses before anything has changed
local h = redis.call('HMGET', KEYS[1], 'st', 'a', 'p', 'x:' .. ARGV[2], 'whole', 'j:' .. ARGV[2])
if h[1] ~= 'open' or h[2] ~= ARGV[3] then
  if ARGV[5] ~= h[3] and redis.call('XACK', KEYS[2], 'g', ARGV[5]) == 1 then redis.call('XDEL', KEYS[2], ARGV[5]) end
  return -1
end
if h[4] or redis.call('HSETNX', KEYS[1], 's:' .. ARGV[2], ARGV[4]) == 0 then return 0 end
if h[6] then drop_journal(KEYS[1], ARGV[2], h[6]) end
if not h[5] then redis.call('XADD', KEYS[3], '*', 'g', ARGV[1], 'a', ARGV[3], 'k', ARGV[2]) end
if redis.call('HINCRBY', KEYS[1], 'todo', -1) == 0 then
  redis.call('XACK', KEYS[2], 'g', h[3])
  redis.call('XDEL', KEYS[2], h[3])
  if h[5] then redis.call('XADD', KEYS[3], '*', 'g', ARGV[1], 'a', ARGV[3], 'k', '*') end
else
  innocent(KEYS[2], h[3])
end
return 1
