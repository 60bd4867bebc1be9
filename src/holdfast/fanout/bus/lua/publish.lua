-- KEYS[1]  the channel
-- ARGV[1]  the payload
-- returns  how many subscribers it reached: 0 on a replica, so this proves nothing

return redis.call('PUBLISH', KEYS[1], ARGV[1])
