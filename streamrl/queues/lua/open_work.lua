-- What there is to do for a leased prompt.
-- KEYS    group prompts
-- ARGV    entry attempt
-- returns {prompt, n, {missing samples}}; nil when the group is gone, closed or on another attempt, or the entry is not
--         its own: then the dangling entry was removed
-- repeat  the same
local h = redis.call('HMGET', KEYS[1], 'st', 'a', 'p', 'n', 'prompt')
if h[1] == 'open' and h[2] == ARGV[2] and h[3] == ARGV[1] then
  local have, missing = {}, {}
  for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do have[field] = true end
  for k = 0, tonumber(h[4]) - 1 do
    if not have['s:' .. k] and not have['x:' .. k] then missing[#missing + 1] = k end
  end
  if #missing > 0 then return {h[5], tonumber(h[4]), missing} end
end
redis.call('XACK', KEYS[2], 'g', ARGV[1])
redis.call('XDEL', KEYS[2], ARGV[1])
return false
