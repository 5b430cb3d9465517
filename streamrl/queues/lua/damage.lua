-- What somebody may have damaged in one key space: types of its keys, fields of its hashes.
-- KEYS    state live roles, then others
-- ARGV    a type for each of KEYS, then the prefixes (same slot as the rest) of dropped bitmaps, role hashes and group
--         hashes; the last one empty: group hashes are left out
-- returns {key, its type, the right one} of each key of a wrong type, flat state,
--         {id, has a prompt (1|0), n, m, todo, left, nx, a, v, t, st} of each live group
-- repeat  reads again; nothing is written
local wrong, right = {}, {}
local function check(key, wanted)
  local kind = redis.call('TYPE', key).ok
  right[key] = kind == wanted
  if kind ~= wanted and kind ~= 'none' then wrong[#wrong + 1] = { key, kind, wanted } end
end

for i, key in ipairs(KEYS) do check(key, ARGV[i]) end
local dropped, role, group = unpack(ARGV, #KEYS + 1)
local state, groups = {}, {}
if right[KEYS[1]] then
  state = redis.call('HGETALL', KEYS[1])
  for i = 1, #state, 2 do
    local why = string.match(state[i], '^dropped:(.*)$')
    if why then check(dropped .. why, 'string') end
  end
end
if right[KEYS[3]] then
  for _, name in ipairs(redis.call('SMEMBERS', KEYS[3])) do check(role .. name, 'hash') end
end
if group ~= '' and right[KEYS[2]] then
  for _, gid in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
    local key = group .. gid
    check(key, 'hash')
    if right[key] then
      local numbers = redis.call('HMGET', key, 'n', 'm', 'todo', 'left', 'nx', 'a', 'v', 't', 'st')
      groups[#groups + 1] = { gid, redis.call('HEXISTS', key, 'prompt'), unpack(numbers) }
    end
  end
end
return { wrong, state, groups }
