-- Samples die: they get a cause of death and a dead letter each; the last open sample closes its group.
-- include _group_letter _close _drop_journal
-- KEYS    stream group scored dead live state rollouts       stream: prompts, or rollouts for the stage reward
-- ARGV    stage entry gid k attempt why deliveries detail doom
--         stage prompt: every sample without payload and cause; generate: sample k; reward: sample k, * for all that have
--         a payload (a group that is scored whole)
--         doom 1: the whole group dies of it, once its other samples have a score or a cause of death too
-- returns 0 nothing to do (a repeat, or somebody else was first); -1 the group is gone, closed or on another attempt;
--         1 written; 2 written, and the group is in `scored`; 3 written, and the group is a dead letter
-- repeat  0 or -1. Gates: the acknowledgement of the entry (prompt, reward), no payload and no cause (generate)
-- full    runs: it starts by freeing
local stage, G = ARGV[1], KEYS[2]
if stage == 'generate' then
  redis.call('XDEL', KEYS[1], '0-1')
else
  if redis.call('XACK', KEYS[1], 'g', ARGV[2]) == 0 then return 0 end
  redis.call('XDEL', KEYS[1], ARGV[2])
end
local h = redis.call('HMGET', G, 'st', 'a', 'n', 'p', 'whole')
if h[1] ~= 'open' or h[2] ~= ARGV[5] then return -1 end
local first, last = tonumber(ARGV[4]), tonumber(ARGV[4])
if stage == 'prompt' or ARGV[4] == '*' then first, last = 0, tonumber(h[3]) - 1 end
local died, detail = 0, ARGV[8]
for k = first, last do
  local generated = redis.call('HEXISTS', G, 's:' .. k) == 1
  if redis.call('HEXISTS', G, 'x:' .. k) == 0 and generated == (stage == 'reward') then
    redis.call('HSET', G, 'x:' .. k, ARGV[6])
    local turns = redis.call('HGET', G, 'j:' .. k)
    if turns then drop_journal(G, k, turns) end
    redis.call('XADD', KEYS[4], '*', 'g', ARGV[3], 'k', k, 'a', ARGV[5], 'why', ARGV[6], 'stage', stage,
      'deliveries', ARGV[7], 'detail', detail)
    died, detail = died + 1, '' -- one traceback for all samples of a prompt
  end
end
if died == 0 then return 0 end
redis.call('HINCRBY', G, 'nx', died)
if ARGV[9] == '1' then redis.call('HSETNX', G, 'doom', ARGV[6]) end
local complete = stage ~= 'reward' and redis.call('HINCRBY', G, 'todo', -died) == 0
if complete and stage == 'generate' then
  redis.call('XACK', KEYS[1], 'g', h[4])
  redis.call('XDEL', KEYS[1], h[4])
end
if redis.call('HINCRBY', G, 'left', -died) == 0 then
  return close(G, ARGV[3], KEYS[3], KEYS[4], KEYS[5], KEYS[6])
end
if complete and h[5] then redis.call('XADD', KEYS[7], '*', 'g', ARGV[3], 'a', ARGV[5], 'k', '*') end
return 1
