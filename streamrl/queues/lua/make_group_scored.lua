-- Make one whole of a group whose samples were put up one by one, before its rewards compared them. The scores that it
-- has so far go: they were made without the comparison. Groups admitted from now on are whole.
-- KEYS    rollouts group state
-- ARGV    entry gid attempt       entry: of one of its samples
-- returns 0 somebody else had this entry first; -1 the group is gone, closed or on another attempt (the entry is
--         removed); 1 the group is whole, and put up when all its samples were generated
-- repeat  0: the gate is the acknowledgement of the entry
-- full    runs: it starts by freeing
if redis.call('XACK', KEYS[1], 'g', ARGV[1]) == 0 then return 0 end
redis.call('XDEL', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[3], 'whole', 1)
local G = KEYS[2]
local h = redis.call('HMGET', G, 'st', 'a', 'n', 'todo')
if h[1] ~= 'open' or h[2] ~= ARGV[3] then return -1 end
for _, e in ipairs(redis.call('XRANGE', KEYS[1], '-', '+')) do
  if e[2][2] == ARGV[2] and e[2][4] == ARGV[3] then
    redis.call('XACK', KEYS[1], 'g', e[1])
    redis.call('XDEL', KEYS[1], e[1])
  end
end
local undone = 0
for k = 0, tonumber(h[3]) - 1 do undone = undone + redis.call('HDEL', G, 'r:' .. k) end
redis.call('HINCRBY', G, 'left', undone)
redis.call('HSET', G, 'whole', 1)
if h[4] == '0' then redis.call('XADD', KEYS[1], '*', 'g', ARGV[2], 'a', ARGV[3], 'k', '*') end
return 1
