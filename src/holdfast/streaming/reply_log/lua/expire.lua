-- Lets a log and the claim of its reply live for so many seconds from now.
local function expire(log, seconds)
    redis.call('EXPIRE', log, seconds)
    local name = string.gsub(log, 'log:', 'claimed:', 1)
    local claim = redis.call('GET', name)
    if claim then
        redis.call('EXPIRE', claim, seconds)
        redis.call('EXPIRE', name, seconds)
    end
end
