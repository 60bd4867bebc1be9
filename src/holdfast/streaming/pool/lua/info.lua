-- returns  INFO memory, or '' if this user may not see it

local info = redis.pcall('INFO', 'memory')
return type(info) == 'string' and info or ''
