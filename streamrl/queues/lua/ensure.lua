-- Make a work stream and its consumer group, which starts at the first entry.
-- KEYS    stream
-- returns 1 made; 0 it was there
-- repeat  0
-- full    a stream that is there is not touched; making one waits for room
if redis.call('EXISTS', KEYS[1]) == 1 then
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    if group[2] == 'g' then return 0 end
  end
end
redis.call('XGROUP', 'CREATE', KEYS[1], 'g', '0', 'MKSTREAM')
return 1
