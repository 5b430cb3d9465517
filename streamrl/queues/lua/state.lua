-- The counters of one key space, in one instant.
-- KEYS    state live dead replays
-- returns {fields and values of state, live groups, dead letters, dead groups that wait to be admitted again}
-- repeat  reads again; nothing is written
return {redis.call('HGETALL', KEYS[1]), redis.call('ZCARD', KEYS[2]), redis.call('XLEN', KEYS[3]),
  redis.call('HLEN', KEYS[4])}
