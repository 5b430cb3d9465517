-- Empty the journal of a sample that is still being generated, because its episode begins again.
-- include _holds _drop_journal
-- KEYS    group prompts
-- ARGV    entry attempt consumer k
-- returns 1 it is empty; 0 it is not the caller's, as in journal
-- repeat  the same
-- full    runs: it only frees
local count = holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[4])
if not count then return 0 end
drop_journal(KEYS[1], ARGV[4], count)
redis.call('HSET', KEYS[1], 'again', 1) -- turns that are made again and again do not clear it of deaths
return 1
