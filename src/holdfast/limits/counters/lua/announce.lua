-- This node lives on; how many nodes do.
--
-- KEYS[1]  sorted set: node -> until (ms)
-- ARGV     [1] the node, [2] for how many ms
-- returns  the number of living nodes

local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('PEXPIRE', KEYS[1], math.ceil(ARGV[2]))
return redis.call('ZCARD', KEYS[1])
