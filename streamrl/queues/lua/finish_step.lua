-- A step is done: tell how many trained groups are still here, publish the new version, clear the crash counters.
-- KEYS    state scored weights group...       group: the groups of the step
-- ARGV    nonce held version manifest         held empty: it stays; manifest empty: nothing is published
-- returns 0 fenced; 1 set
-- repeat  no change: numbers are absolute, and a version is published once
-- full    runs: it starts by freeing
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return 0 end
redis.call('XDEL', KEYS[2], '0-1')
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], 'held', ARGV[2]) end
for i = 4, #KEYS do redis.call('HDEL', KEYS[i], 't', 'tn') end
if ARGV[4] ~= '' and tonumber(ARGV[3]) > tonumber(redis.call('HGET', KEYS[1], 'version') or '0') then
  local entry = redis.pcall('XADD', KEYS[3], 'MAXLEN', '~', 100, '*', 'v', ARGV[3], 'm', ARGV[4])
  if entry.err then
    -- Somebody else added an entry with the last id there is: it goes, and the stream counts from the last version on.
    local at = redis.call('HGET', KEYS[1], 'weights')
    for _, foreign in ipairs(redis.call('XRANGE', KEYS[3], at and '(' .. at or '-', '+')) do
      redis.call('XDEL', KEYS[3], foreign[1])
    end
    redis.call('XSETID', KEYS[3], at or '0-0')
    entry = redis.call('XADD', KEYS[3], 'MAXLEN', '~', 100, '*', 'v', ARGV[3], 'm', ARGV[4])
  end
  redis.call('HSET', KEYS[1], 'version', ARGV[3], 'weights', entry)
end
return 1
