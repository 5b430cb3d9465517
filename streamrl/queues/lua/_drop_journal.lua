-- drop_journal(G, k, n): the n journaled turns of sample k go, their count, and the state after them.
local function drop_journal(G, k, n)
  for i = 0, (tonumber(n) or 0) - 1 do redis.call('HDEL', G, 'j:' .. k .. ':' .. i) end
  redis.call('HDEL', G, 'j:' .. k, 'j:' .. k .. ':s')
end
