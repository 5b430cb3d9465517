-- Write the score of one sample; the last one closes its group.
-- include _group_letter _close
-- KEYS    rollouts group scored dead live state
-- ARGV    entry gid k attempt score
-- returns 0 somebody else committed this entry; -1 the group is gone (the entry is removed); 1 written;
--         2 written, and the group is in `scored`; 3 written, and the group is a dead letter
-- repeat  0: the gate is the acknowledgement of the entry, the first to give it wins
-- full    runs: it starts by freeing
if redis.call('XACK', KEYS[1], 'g', ARGV[1]) == 0 then return 0 end
redis.call('XDEL', KEYS[1], ARGV[1])
local h = redis.call('HMGET', KEYS[2], 'st', 'a')
if h[1] ~= 'open' or h[2] ~= ARGV[4] then return -1 end
redis.call('HSET', KEYS[2], 'r:' .. ARGV[3], ARGV[5])
if redis.call('HINCRBY', KEYS[2], 'left', -1) == 0 then
  return close(KEYS[2], ARGV[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6])
end
return 1
