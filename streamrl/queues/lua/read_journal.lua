-- The journaled turns of one sample, in order.
-- KEYS    group
-- ARGV    attempt k
-- returns the turns; none when the group is gone, closed or on another attempt
-- repeat  the same
local h = redis.call('HMGET', KEYS[1], 'st', 'a', 'j:' .. ARGV[2])
local turns = {}
if h[1] == 'open' and h[2] == ARGV[1] then
  for i = 0, (tonumber(h[3]) or 0) - 1 do
    local turn = redis.call('HGET', KEYS[1], 'j:' .. ARGV[2] .. ':' .. i)
    if not turn then break end -- deleted by a foreign hand
    turns[#turns + 1] = turn
  end
end
return turns
