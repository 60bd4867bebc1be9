-- A page of a log.
-- KEYS: the log
-- ARGV: the id after which it begins, or '' for the begin of the last epoch; how many entries
-- Answers the log's last id and the entries, or nothing without a log.
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if not last then return false end
local from = string.match(last[1], '^%d+') .. '-0'
if ARGV[1] ~= '' then from = '(' .. ARGV[1] end
return {last[1], redis.call('XRANGE', KEYS[1], from, '+', 'COUNT', ARGV[2])}
