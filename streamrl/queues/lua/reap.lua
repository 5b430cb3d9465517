-- Forget consumers that hold nothing (a consumer that is forgotten with work loses it for everybody).
-- KEYS    stream
-- ARGV    consumer idle_ms       consumer empty: every one that was silent for idle_ms
-- returns number forgotten
-- repeat  0. A forgotten consumer that reads again is simply made anew
local n = 0
for _, c in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], 'g')) do
  -- name, pending and idle are the first three pairs on every version
  if c[4] == 0 and c[6] >= tonumber(ARGV[2]) and (ARGV[1] == '' or c[2] == ARGV[1]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], 'g', c[2])
    n = n + 1
  end
end
return n
