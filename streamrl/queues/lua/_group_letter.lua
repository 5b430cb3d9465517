-- letter(G, gid, dead, live, state, why, stage, detail): a whole group dies. Its letter (k = -1) carries the prompt and
-- the sizes, so that it can be replayed under a new attempt; payloads are not kept. The hash and its id go.
local function letter(G, gid, dead, live, state, why, stage, detail)
  local h = redis.call('HMGET', G, 'prompt', 'n', 'm', 'a', 'v', 'nx')
  redis.call('XADD', dead, '*', 'g', gid, 'k', '-1', 'a', h[4], 'why', why, 'stage', stage, 'failed', h[6], 'n', h[2],
    'm', h[3], 'v', h[5], 'prompt', h[1], 'detail', detail)
  redis.call('UNLINK', G)
  redis.call('ZREM', live, gid)
  redis.call('HINCRBY', state, 'dead', 1)
end
