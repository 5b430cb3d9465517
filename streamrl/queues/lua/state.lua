-- The counters of one key space, in one instant.
-- KEYS    state live dead
-- returns {fields and values of state, live groups, dead letters}
-- repeat  reads again; nothing is written
return {redis.call('HGETALL', KEYS[1]), redis.call('ZCARD', KEYS[2]), redis.call('XLEN', KEYS[3])}
