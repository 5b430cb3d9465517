-- Be the one holder of a key, renew that, or give it up.
-- KEYS    key more...       more: what goes with it when it is given up
-- ARGV    holder ms       ms: for how long, unless it is renewed; 0: give it up
-- returns 1 it is the caller's (was, if it gives it up); 0 another holder has it
-- repeat  the same; 0 if it is given up
-- full    renewing and giving up run; taking is refused
local held = redis.call('GET', KEYS[1])
if held and held ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then return held and redis.call('DEL', unpack(KEYS)) and 1 or 0 end
if held then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
