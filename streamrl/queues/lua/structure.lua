-- All that the invariants of one key space speak of, at one instant.
-- KEYS    prompts rollouts scored live
-- ARGV    prefix of the group hashes (same slot as the rest), then ids of groups that had a hash before
-- returns {entries of prompts, of rollouts, of scored, {delivered id, pending entries} of prompts, of rollouts, live ids,
--         {id, names of the fields, n, todo, left, nx, st} of each live group, or {id, type of the key},
--         those ids of ARGV that have a hash and are not live}
-- repeat  reads again; nothing is written
local function group_of(key)
  local groups = redis.pcall('XINFO', 'GROUPS', key)
  if groups.err or #groups == 0 then return { '0-0', {} } end
  local group, pending = {}, {}
  for i = 1, #groups[1], 2 do group[groups[1][i]] = groups[1][i + 1] end
  for _, row in ipairs(redis.call('XPENDING', key, group['name'], '-', '+', math.max(1, group['pending']))) do
    pending[#pending + 1] = row[1]
  end
  return { group['last-delivered-id'], pending }
end

local live, groups, strays = redis.call('ZRANGE', KEYS[4], 0, -1), {}, {}
for i, gid in ipairs(live) do
  local key = ARGV[1] .. gid
  local kind = redis.call('TYPE', key).ok
  if kind == 'hash' or kind == 'none' then
    groups[i] = { gid, redis.call('HKEYS', key), unpack(redis.call('HMGET', key, 'n', 'todo', 'left', 'nx', 'st')) }
  else
    groups[i] = { gid, kind }
  end
end
for i = 2, #ARGV do
  if redis.call('EXISTS', ARGV[1] .. ARGV[i]) == 1 and not redis.call('ZSCORE', KEYS[4], ARGV[i]) then
    strays[#strays + 1] = ARGV[i]
  end
end
return {
  redis.call('XRANGE', KEYS[1], '-', '+'),
  redis.call('XRANGE', KEYS[2], '-', '+'),
  redis.call('XRANGE', KEYS[3], '-', '+'),
  group_of(KEYS[1]),
  group_of(KEYS[2]),
  live,
  groups,
  strays,
}
