-- holds(G, prompts, entry, attempt, consumer, k): the journal of sample k is the caller's to write. The group is open
-- and on this attempt, the sample has neither payload nor cause of death, and the entry is the group's own and the
-- caller's: two processes must not write turns into one journal. Answers the number of turns, or nil.
local function holds(G, prompts, entry, attempt, consumer, k)
  local h = redis.call('HMGET', G, 'st', 'a', 'p', 'x:' .. k, 'j:' .. k)
  if h[1] ~= 'open' or h[2] ~= attempt or h[3] ~= entry or h[4] or redis.call('HEXISTS', G, 's:' .. k) == 1 then
    return nil
  end
  local pending = redis.pcall('XPENDING', prompts, 'g', entry, entry, 1)
  if pending.err or #pending == 0 or pending[1][2] ~= consumer then return nil end
  return tonumber(h[5] or '0')
end
