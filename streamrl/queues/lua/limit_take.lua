-- One request asks for its turn in the rate limit of a reward model. Two buckets, of requests and of tokens, are filled
-- as time passes; all sizes are milliseconds of it. Requests wait in one line: the first goes when both buckets have what
-- it takes, one that takes more than a bucket holds when that is full, and leaves a debt. Whoever looks lets all go whose
-- turn it is. Time is the server's: when it goes back, none has passed; when it leaps ahead, a bucket is full, no more.
-- KEYS    limit waiting granted
-- ARGV    id capacity_ms patience_ms       id: any name, a space, and what it takes: request_ms, a space, tokens_ms
-- returns 0: its turn; else milliseconds after which it may be; -1 - so many when they are above patience_ms: then it is
--         not in the line
-- repeat  the same, as of now: it has one place in the line, and what it takes is taken once
-- full    the first write is refused before anything has changed
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local me, capacity = ARGV[1], tonumber(ARGV[2])
local s = redis.call('HMGET', KEYS[1], 'seen', 'requests', 'tokens')
local passed = math.max(0, now - (s[1] or now))
local requests = math.min(capacity, (s[2] or capacity) + passed)
local tokens = math.min(capacity, (s[3] or capacity) + passed)
local line = redis.call('ZRANGE', KEYS[2], 0, -1)
local known = redis.call('ZSCORE', KEYS[2], me)
local mine = redis.call('ZSCORE', KEYS[3], me)
if not known and not mine then line[#line + 1] = me end
local wait, left, turns = 0, { requests, tokens }, {}
for _, one in ipairs(line) do
  local request, cost = string.match(one, ' (%S+) (%S+)$')
  request, cost = tonumber(request), tonumber(cost)
  local more = math.max(0, math.min(request, capacity) - requests, math.min(cost, capacity) - tokens)
  wait = wait + more
  requests = math.min(capacity, requests + more) - request
  tokens = math.min(capacity, tokens + more) - cost
  if wait == 0 then
    turns[#turns + 1] = one
    left = { requests, tokens }
  end
  if one == me then break end
end
redis.call('HSET', KEYS[1], 'seen', now, 'requests', left[1], 'tokens', left[2])
for _, one in ipairs(turns) do
  redis.call('ZREM', KEYS[2], one)
  redis.call('ZADD', KEYS[3], now, one)
end
if #turns > 0 then redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now - 3600000) end -- of processes that died
if mine or turns[#turns] == me then return 0 end
wait = math.ceil(wait)
if known then return wait end
if wait > tonumber(ARGV[3]) then return -1 - wait end
redis.call('ZADD', KEYS[2], redis.call('HINCRBY', KEYS[1], 'line', 1), me)
return wait
