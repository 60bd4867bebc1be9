-- Wakes a node's reader that waits for streams to grow: it waits for this one too.
-- KEYS: the stream
redis.call('XADD', KEYS[1], 'MAXLEN', 1, '*', 'w', '')
redis.call('EXPIRE', KEYS[1], 60)
