-- innocent(prompts, entry): a part of this work has become durable, so earlier deaths are no sign that it kills.
local function innocent(prompts, entry)
  local found = redis.pcall('XPENDING', prompts, 'g', entry, entry, 1)
  local p = not found.err and found[1]
  if p and p[4] > 1 then
    redis.call('XCLAIM', prompts, 'g', p[2], 0, entry, 'IDLE', p[3], 'RETRYCOUNT', 1, 'JUSTID')
  end
end
