-- A learner takes over: from now on every script with another nonce is refused.
-- KEYS    state scored
-- ARGV    nonce epoch_floor
-- returns {epoch, checkpoint, version, base, base_epoch}, strings empty when never set
-- repeat  the same answer; the epoch is raised once per nonce
-- full    runs: it starts by freeing
redis.call('XDEL', KEYS[2], '0-1')
local s = redis.call('HMGET', KEYS[1], 'epoch', 'nonce', 'ckpt', 'version', 'base', 'base_epoch')
local e = tonumber(s[1] or '0')
if s[2] ~= ARGV[1] then
  e = math.max(e, tonumber(ARGV[2])) + 1
  redis.call('HSET', KEYS[1], 'epoch', e, 'nonce', ARGV[1], 'held', 0)
end
return {e, s[3] or '', tonumber(s[4] or '0'), s[5] or '', tonumber(s[6] or '0')}
