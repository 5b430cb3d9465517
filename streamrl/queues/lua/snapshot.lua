-- All that a person wants to see of one ledger, at one instant. Redis 6.2 has no entries-added and no lag: depth -
-- pending is the lag, exact because an ack deletes.
-- KEYS    prompts rollouts scored live dead state dropped roles
-- ARGV    most prefix       most: pending entries read per stream; prefix of the role hashes (same slot as the rest)
-- returns {streams, flat state, live, dead, dropped, roles}: live, dead and dropped are counts;
--         of each stream {depth, pending, added|false, delivered id, undelivered id|false, silent ms, retried,
--         first pending id|false, consumers}; roles: {name, flat fields} of each role that is alive
-- repeat  reads again; nothing is written
local function fields(flat)
  local map = {}
  for i = 1, #flat, 2 do map[flat[i]] = flat[i + 1] end
  return map
end

local held = tonumber(redis.call('HGET', KEYS[6], 'held') or 0)

local function stream(key)
  local depth = redis.call('XLEN', key)
  local groups = redis.pcall('XINFO', 'GROUPS', key)
  if groups.err then return { depth, 0, false, '0-0', false, 0, 0, false, {} } end
  local added = fields(redis.call('XINFO', 'STREAM', key))['entries-added'] or false
  if #groups == 0 then  -- `scored`: its trained groups are about its oldest
    local first = redis.call('XRANGE', key, '-', '+', 'COUNT', held + 1)[held + 1]
    return { depth, 0, added, '0-0', first and first[1] or false, 0, 0, false, {} }
  end
  local group = fields(groups[1])
  local delivered = group['last-delivered-id']
  local next = redis.call('XRANGE', key, '(' .. delivered, '+', 'COUNT', 1)[1]
  local silent, retried, oldest = 0, 0, false
  for _, entry in ipairs(redis.call('XPENDING', key, group['name'], '-', '+', ARGV[1])) do
    oldest = oldest or entry[1]
    silent = math.max(silent, entry[3])
    if entry[4] > 1 then retried = retried + 1 end
  end
  local consumers = {}
  for _, flat in ipairs(redis.call('XINFO', 'CONSUMERS', key, group['name'])) do
    local one = fields(flat)
    consumers[#consumers + 1] = { one['name'], one['pending'], one['idle'] }
  end
  return { depth, group['pending'], added, delivered, next and next[1] or false, silent, retried, oldest, consumers }
end

local roles = {}
for _, name in ipairs(redis.call('SMEMBERS', KEYS[8])) do
  local status = redis.call('HGETALL', ARGV[2] .. name)
  if #status > 0 then roles[#roles + 1] = { name, status } end
end
return {
  { stream(KEYS[1]), stream(KEYS[2]), stream(KEYS[3]) },
  redis.call('HGETALL', KEYS[6]),
  redis.call('ZCARD', KEYS[4]),
  redis.call('XLEN', KEYS[5]),
  redis.call('BITCOUNT', KEYS[7]),
  roles,
}
