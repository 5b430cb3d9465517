-- Settle a group that is scored whole: each of its samples gets a score or a cause of death, and the group is closed.
-- include _group_letter _close
-- KEYS    rollouts group scored dead live state
-- ARGV    entry gid attempt deliveries doom scored k score... k why detail...
--         doom: why the whole group dies, empty: it does not; scored: number of pairs of k and score
-- returns 0 somebody else committed this entry; -1 the group is gone (the entry is removed); -2 the samples named are not
--         those that wait (nothing is written); 2 written, and the group is in `scored`; 3 written, and it is a dead letter
-- repeat  0: the gate is the entry, which must be pending, and is acknowledged
-- full    runs: it starts by freeing
local pending = redis.pcall('XPENDING', KEYS[1], 'g', ARGV[1], ARGV[1], 1)
if pending.err or #pending == 0 then return 0 end -- an error: the stream was deleted
local G, first, deaths = KEYS[2], 7, 7 + 2 * tonumber(ARGV[6])
local h = redis.call('HMGET', G, 'st', 'a', 'n')
local open = h[1] == 'open' and h[2] == ARGV[3]
local waiting = 0
if open then
  local have, named, count = {}, {}, 0
  for _, field in ipairs(redis.call('HKEYS', G)) do have[field] = true end
  for i = first, deaths - 1, 2 do named[ARGV[i]], count = true, count + 1 end
  for i = deaths, #ARGV, 3 do named[ARGV[i]], count = true, count + 1 end
  for k = 0, tonumber(h[3]) - 1 do
    if not have['x:' .. k] then
      if have['r:' .. k] or not have['s:' .. k] or not named[tostring(k)] then return -2 end
      waiting = waiting + 1
    end
  end
  if waiting ~= count then return -2 end
end
redis.call('XACK', KEYS[1], 'g', ARGV[1])
redis.call('XDEL', KEYS[1], ARGV[1])
if not open then return -1 end
for i = first, deaths - 1, 2 do redis.call('HSET', G, 'r:' .. ARGV[i], ARGV[i + 1]) end
for i = deaths, #ARGV, 3 do
  redis.call('HSET', G, 'x:' .. ARGV[i], ARGV[i + 1])
  redis.call('HINCRBY', G, 'nx', 1)
  redis.call('XADD', KEYS[4], '*', 'g', ARGV[2], 'k', ARGV[i], 'a', ARGV[3], 'why', ARGV[i + 1], 'stage', 'reward',
    'deliveries', ARGV[4], 'detail', ARGV[i + 2])
end
if ARGV[5] ~= '' then redis.call('HSETNX', G, 'doom', ARGV[5]) end
redis.call('HINCRBY', G, 'left', -waiting)
return close(G, ARGV[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6])
