-- Hand work back: the next taker gets it at once, and this delivery does not count as a death.
-- KEYS    stream
-- ARGV    consumer unowned idle_ms id counted id counted...
--         unowned: the name that holds what nobody works on; counted: 1 if this delivery was counted, else 0
-- returns number handed back; entries that are not the caller's are not touched
-- repeat  0
local n = 0
for i = 4, #ARGV, 2 do
  local p = redis.call('XPENDING', KEYS[1], 'g', ARGV[i], ARGV[i], 1)[1]
  if p and p[2] == ARGV[1] then
    redis.call('XCLAIM', KEYS[1], 'g', ARGV[2], 0, ARGV[i], 'IDLE', ARGV[3], 'RETRYCOUNT',
      math.max(0, p[4] - ARGV[i + 1]), 'JUSTID')
    n = n + 1
  end
end
return n
