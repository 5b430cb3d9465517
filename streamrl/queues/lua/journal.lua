-- Write one finished turn of a sample that is still being generated.
-- include _holds _innocent
-- KEYS    group prompts
-- ARGV    entry attempt consumer k number payload [state]
--         number: place in the journal of the sample, from 0; state: of its environment after this turn. The state
--         before it goes: only the newest one is of use
-- returns 1 written; 0 there is a turn of this number, those before it are missing (Redis went back), the sample has a
--         payload or a cause of death, the group is gone, closed or on another attempt, or another process has the lease
-- repeat  0
-- full    the first write is the turn, which a full server refuses before anything has changed
local count = holds(KEYS[1], KEYS[2], ARGV[1], ARGV[2], ARGV[3], ARGV[4])
if count ~= tonumber(ARGV[5]) then return 0 end
local J = 'j:' .. ARGV[4]
local written = { J .. ':' .. ARGV[5], ARGV[6], J, count + 1 }
if ARGV[7] then
  written[5], written[6] = J .. ':s', ARGV[7]
end
redis.call('HSET', KEYS[1], unpack(written))
if redis.call('HEXISTS', KEYS[1], 'again') == 0 then innocent(KEYS[2], ARGV[1]) end
return 1
