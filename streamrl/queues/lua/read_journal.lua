-- The journaled turns of one sample, in order, and the state that its environment had after the last one that has one.
-- KEYS    group
-- ARGV    attempt k
-- returns {turns, state or false}; no turns when the group is gone, closed or on another attempt
-- repeat  the same
local J = 'j:' .. ARGV[2]
local h = redis.call('HMGET', KEYS[1], 'st', 'a', J, J .. ':s')
if h[1] ~= 'open' or h[2] ~= ARGV[1] then return { {}, false } end
local turns = {}
for i = 0, (tonumber(h[3]) or 0) - 1 do
  local turn = redis.call('HGET', KEYS[1], J .. ':' .. i)
  if not turn then break end -- deleted by a foreign hand
  turns[#turns + 1] = turn
end
return { turns, h[4] }
