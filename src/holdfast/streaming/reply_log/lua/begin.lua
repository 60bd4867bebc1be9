-- Begins an epoch of a log with its entry 0.
-- KEYS: the log
-- ARGV: the entry; seconds that the log lives
-- Answers the epoch and how many entries the older ones have; nothing if the log has its end.
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
local time = redis.call('TIME')
local epoch = time[1] * 1000 + math.floor(time[2] / 1000)
if last then
    if string.sub(last[2][2], 1, 1) == 'e' then return false end
    epoch = math.max(epoch, tonumber(string.match(last[1], '^%d+')) + 1)
end
epoch = string.format('%.0f', epoch)
redis.call('XADD', KEYS[1], epoch .. '-0', 'e', ARGV[1])
expire(KEYS[1], ARGV[2])
return {epoch, redis.call('XLEN', KEYS[1]) - 1}
