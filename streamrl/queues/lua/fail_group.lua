-- A whole group dies at the learner's hand: it killed the learner too often, or it was lost with a checkpoint.
-- include _group_letter
-- KEYS    state scored live dead dropped group
-- ARGV    nonce gid why detail
-- returns -1 fenced; 0 open, dropped, not yet admitted, or dead already; 1 a closed group became a dead letter;
--         2 a group without a hash got a letter (without prompt)
-- repeat  0
-- full    runs: it starts by freeing
if redis.call('HGET', KEYS[1], 'nonce') ~= ARGV[1] then return -1 end
redis.call('XDEL', KEYS[2], '0-1')
local h = redis.call('HMGET', KEYS[6], 'st', 'q')
if h[1] == 'closed' then
  redis.call('XDEL', KEYS[2], h[2])
  letter(KEYS[6], ARGV[2], KEYS[4], KEYS[3], KEYS[1], ARGV[3], 'learner', ARGV[4])
  return 1
end
if h[1] or tonumber(ARGV[2]) >= tonumber(redis.call('HGET', KEYS[1], 'cursor') or '0') then return 0 end
if redis.call('GETBIT', KEYS[5], ARGV[2]) == 1 then return 0 end
for _, e in ipairs(redis.call('XRANGE', KEYS[4], '-', '+')) do
  if e[2][2] == ARGV[2] and e[2][4] == '-1' then return 0 end
end
redis.call('XADD', KEYS[4], '*', 'g', ARGV[2], 'k', '-1', 'a', 0, 'why', ARGV[3], 'stage', 'learner', 'detail', ARGV[4])
redis.call('HINCRBY', KEYS[1], 'dead', 1)
return 2
