-- Renew the leases a process holds, without counting a delivery. Only entries that are still its own are touched. What
-- was said of its death is void: it lives.
-- KEYS    stream deaths
-- ARGV    consumer id...
-- returns {taken, gone, undelivered}: ids that another consumer holds; ids that are done with; {id, deliveries} of entries
--         that are pending as mine but not in the list (the reply with them was lost, or is on its way)
-- repeat  the same
redis.call('HDEL', KEYS[2], ARGV[1])
local taken, gone, undelivered, have = {}, {}, {}, {}
for i = 2, #ARGV do
  have[ARGV[i]] = true
  local p = redis.call('XPENDING', KEYS[1], 'g', ARGV[i], ARGV[i], 1)
  if not p[1] then gone[#gone + 1] = ARGV[i]
  elseif p[1][2] ~= ARGV[1] then taken[#taken + 1] = ARGV[i]
  else redis.call('XCLAIM', KEYS[1], 'g', ARGV[1], 0, ARGV[i], 'JUSTID') end
end
local from = '-'
repeat
  local page = redis.call('XPENDING', KEYS[1], 'g', from, '+', 1000, ARGV[1])
  for _, p in ipairs(page) do
    if not have[p[1]] then undelivered[#undelivered + 1] = {p[1], p[4]} end
    from = '(' .. p[1]
  end
until #page < 1000
return {taken, gone, undelivered}
