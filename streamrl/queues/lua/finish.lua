-- The data set is used up: no group will be admitted at or after `end`.
-- KEYS    state scored
-- ARGV    end epochs       epochs: the passes over the data that end there
-- returns 1 when the cursor stands at end (done and epochs are set); 0 when it does not (nothing is written)
-- repeat  the same
if tonumber(redis.call('HGET', KEYS[1], 'cursor') or '0') ~= tonumber(ARGV[1]) then return 0 end
redis.call('XDEL', KEYS[2], '0-1') -- a write that frees first: lets the rest run when memory is full
redis.call('HSET', KEYS[1], 'done', ARGV[1], 'epochs', ARGV[2])
return 1
