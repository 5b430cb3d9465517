-- close(G, gid, scored, dead, live, state): every sample of the group has a score or a cause of death.
-- 2: at least m have a score: the group is in `scored`, and immutable from now on. 3: fewer have, or a sample doomed the
-- group: it is a dead letter.
local function close(G, gid, scored, dead, live, state)
  local h = redis.call('HMGET', G, 'n', 'nx', 'm', 'doom')
  if h[4] then
    letter(G, gid, dead, live, state, h[4], 'reward', '')
    return 3
  end
  if tonumber(h[1]) - tonumber(h[2]) >= tonumber(h[3]) then
    local q = redis.call('XADD', scored, '*', 'g', gid)
    redis.call('HSET', G, 'st', 'closed', 'q', q)
    return 2
  end
  letter(G, gid, dead, live, state, 'fewer scored samples than min_group', 'close', '')
  return 3
end
