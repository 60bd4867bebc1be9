-- Forget what one counter has used, and let every node know: it may remember a refusal.
--
-- KEYS     [1] the counter, [2] sorted set: counter -> when it was reset (ms)
-- ARGV     [1] for how many ms it is told, [2] how many at most
-- returns  1 if the counter was there, else 0

local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
redis.call('ZADD', KEYS[2], now, KEYS[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[2], 0, -1 - ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[1])
return redis.call('DEL', KEYS[1])
