-- Throw dead letters away. A whole group stays accounted for: its id goes to the dropped ones.
-- KEYS    dead dropped dropped_for_reason state
-- ARGV    why letter...
-- returns number of letters removed
-- repeat  0
-- full    runs: it starts by freeing
local n = 0
for i = 2, #ARGV do
  local e = redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i])
  if e[1] and redis.call('XDEL', KEYS[1], ARGV[i]) == 1 then
    n = n + 1
    if e[1][2][4] == '-1' then
      redis.call('SETBIT', KEYS[2], e[1][2][2], 1)
      redis.call('SETBIT', KEYS[3], e[1][2][2], 1)
      redis.call('HINCRBY', KEYS[4], 'dropped', 1)
      redis.call('HINCRBY', KEYS[4], 'dropped:' .. ARGV[1], 1)
    end
  end
end
return n
