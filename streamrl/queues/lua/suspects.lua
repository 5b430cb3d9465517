-- How many pieces of work may be to blame for the death of a process. The first answer stays, so that all who take over
-- from it agree.
-- KEYS    deaths hosts stream...       stream: all from which the process had work
-- ARGV    consumer role silent_ms lease_ms       silent_ms: since it renewed that work
-- returns 0: none, because its host died: other processes of the run were on it, and died with it;
--         nil: too early to say so, ask again; else the number of entries that it held
-- repeat  the same
-- full    runs: it starts by freeing
redis.call('XDEL', KEYS[3], '0-1')
local known = redis.call('HGET', KEYS[1], ARGV[1])
if known then return tonumber(string.match(known, '%d+')) end
local held = 0
for i = 3, #KEYS do
  local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[i], 'g')
  for _, c in ipairs(consumers.err and {} or consumers) do -- a stream may be gone
    if c[2] == ARGV[1] then held = held + c[4] end
  end
end
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local seen = now - ARGV[3]
local SLACK, DAY = 2000, 86400000 -- beats come every second
local dead_by = seen + ARGV[4] / 3 + SLACK
local lives, host = {}, nil
local flat = redis.call('HGETALL', KEYS[2])
for i = 1, #flat, 2 do
  local on, role = string.match(flat[i], '^(%S+) (%S+)')
  local first, last = string.match(flat[i + 1], '(%S+) (%S+)')
  first, last = tonumber(first), tonumber(last)
  if last < seen - DAY then redis.call('HDEL', KEYS[2], flat[i])
  elseif role == ARGV[2] and first <= seen and last >= seen - SLACK then host = on
  elseif last >= seen - SLACK then lives[#lives + 1] = { on, first, last } end
end
local died, survived = 0, 0
for _, life in ipairs(lives) do
  if life[1] == host and life[3] <= dead_by then died = died + 1
  elseif life[1] == host and life[2] <= seen then survived = survived + 1 end
end
if died > 0 and survived == 0 then
  if now <= dead_by + SLACK then return false end -- the beats of those who live may be on their way
  held = 0
end
local said = redis.call('HGETALL', KEYS[1])
for i = 1, #said, 2 do
  if tonumber(string.match(said[i + 1], '%d+$')) < now - DAY then redis.call('HDEL', KEYS[1], said[i]) end
end
redis.call('HSET', KEYS[1], ARGV[1], held .. ' ' .. now)
return held
