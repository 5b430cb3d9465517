-- Queue dead groups to be admitted again, as soon as there is room for each (`replay`).
-- KEYS    dead replays
-- ARGV    gid entry letters...       entry: the letter of the group; letters: those of its samples, with commas
-- returns for each gid: 1 it is queued; 0 there is no such letter; 3 no prompt
-- repeat  the same: a group is queued once
-- full    runs: it starts by freeing
redis.call('XDEL', KEYS[1], '0-1')
local answers = {}
for i = 1, #ARGV, 3 do
  local answer = 0
  local e = redis.call('XRANGE', KEYS[1], ARGV[i + 1], ARGV[i + 1])
  if e[1] and e[1][2][2] == ARGV[i] and e[1][2][4] == '-1' then
    answer = 3
    for j = 1, #e[1][2], 2 do
      if e[1][2][j] == 'prompt' then answer = 1 end
    end
  end
  if answer == 1 then redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1] .. ',' .. ARGV[i + 2]) end
  answers[#answers + 1] = answer
end
return answers
