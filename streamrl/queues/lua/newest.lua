-- The newest version of the weights: the entry that `finish_step` wrote last. Entries behind it are none of ours: they go.
-- KEYS    weights state
-- ARGV    most       entries removed at once
-- returns {entry, version, manifest, foreign}, the first three empty when there is none; foreign: the fields of each
--         entry that was removed
-- repeat  reads again, and finds nothing to remove
-- full    runs: it starts by freeing
local at = redis.call('HGET', KEYS[2], 'weights')
if not at then
  -- A run whose learner did not name its entries yet: its version is the newest entry with that number.
  local version = redis.call('HGET', KEYS[2], 'version')
  for _, entry in ipairs(version and redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', ARGV[1]) or {}) do
    if not at and entry[2][1] == 'v' and entry[2][2] == version then at = entry[1] end
  end
end
local foreign = {}
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], at and '(' .. at or '-', '+', 'COUNT', ARGV[1])) do
  redis.call('XDEL', KEYS[1], entry[1])
  foreign[#foreign + 1] = entry[2]
end
if #foreign > 0 then redis.call('HINCRBY', KEYS[2], 'foreign', #foreign) end
local ours = at and redis.call('XRANGE', KEYS[1], at, at)[1]
if not ours then return {'', '', '', foreign} end
return {at, ours[2][2], ours[2][4], foreign}
