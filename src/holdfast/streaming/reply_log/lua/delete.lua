-- Deletes logs and their claims.
-- KEYS: for each the log, and where the claim of the reply is named
for i = 1, #KEYS, 2 do
    local claim = redis.call('GET', KEYS[i + 1])
    if claim then redis.call('DEL', claim) end
    redis.call('DEL', KEYS[i], KEYS[i + 1])
end
