-- This node lives on; which nodes do, and which counters were reset since it last asked.
--
-- KEYS     [1] sorted set: node -> until (ms), [2] sorted set: counter -> when it was reset (ms)
-- ARGV     [1] the node, [2] for how many ms, [3] when it last asked (ms), [4] how many names at most, [5] 1: with INFO
-- returns  [now ms as text, how many nodes live, their names in order, the counters, INFO memory; '' if not to be had]

local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('PEXPIRE', KEYS[1], math.ceil(ARGV[2]))
local nodes = redis.call('ZRANGE', KEYS[1], 0, -1)
table.sort(nodes)
local names = {}
for n = 1, math.min(#nodes, tonumber(ARGV[4])) do
  names[n] = nodes[n]
end
local info = ARGV[5] == '1' and redis.pcall('INFO', 'memory')
return { string.format('%.17g', now), #nodes, names, redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. ARGV[3], '+inf'),
  type(info) == 'string' and info or '' }
