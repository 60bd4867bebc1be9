-- Removes a claim if it names this reply.
-- KEYS: the claim; where the claim of the reply is named
-- ARGV: the reply's id
local found = redis.call('GET', KEYS[1])
if found and cmsgpack.unpack(found)[6] == ARGV[1] then redis.call('DEL', KEYS[1], KEYS[2]) end
