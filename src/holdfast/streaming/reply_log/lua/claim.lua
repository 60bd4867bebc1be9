-- Puts a claim if there is none, and names it by its reply.
-- KEYS: the claim; where the claim of the reply is named
-- ARGV: the claim's value; seconds that it lives
-- Answers the value of the claim that is in force.
local found = redis.call('GET', KEYS[1])
if found then return found end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
redis.call('SET', KEYS[2], KEYS[1], 'EX', ARGV[2])
return ARGV[1]
