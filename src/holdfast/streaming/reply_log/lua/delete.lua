-- Deletes logs and their claims.
-- KEYS: the logs
for _, log in ipairs(KEYS) do
    local name = string.gsub(log, 'log:', 'claimed:', 1)
    local claim = redis.call('GET', name)
    if claim then redis.call('DEL', claim) end
    redis.call('DEL', log, name)
end
