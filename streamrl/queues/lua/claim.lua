-- Take over one expired entry, or start one that this process has reserved.
-- KEYS    stream
-- ARGV    consumer entry min_idle_ms expected count       expected: deliveries so far; count: deliveries from now on
-- returns fields of the entry; nil when it is done with, not expired, or taken by somebody else in the meantime
-- repeat  the same fields: it is mine and has the count already
local p = redis.call('XPENDING', KEYS[1], 'g', ARGV[2], ARGV[2], 1)[1]
if not p then return false end
local mine = p[2] == ARGV[1]
if not mine and p[3] < tonumber(ARGV[3]) then return false end
if p[4] ~= tonumber(ARGV[4]) and not (mine and p[4] == tonumber(ARGV[5])) then return false end
local e = redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[2])
if not e[1] then -- deleted by a foreign hand: 6.2 would keep it pending for ever
  redis.call('XACK', KEYS[1], 'g', ARGV[2])
  return false
end
redis.call('XCLAIM', KEYS[1], 'g', ARGV[1], 0, ARGV[2], 'RETRYCOUNT', ARGV[5], 'JUSTID')
return e[1][2]
