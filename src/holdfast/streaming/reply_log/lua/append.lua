-- Appends to many logs; each append alone is all or nothing.
-- KEYS: for each append the log, and where the claim of the reply is named
-- ARGV: seconds that a log lives after its end; then for each append its epoch, the number of its
--       first entry, how many entries, and the entries
-- Answers for each append 1, or if nothing was written the log's last id, or '' without a log.
local answers = {}
local at = 2
for i = 1, #KEYS, 2 do
    local key, epoch, n, count = KEYS[i], ARGV[at] .. '-', ARGV[at + 1], ARGV[at + 2]
    local last = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
    local answer
    if not last then
        answer = ''
    elseif last[1] ~= epoch .. (n - 1) or string.sub(last[2][2], 1, 1) == 'e' then
        answer = last[1]
    else
        for j = 0, count - 1 do
            redis.call('XADD', key, 'NOMKSTREAM', epoch .. (n + j), 'e', ARGV[at + 3 + j])
        end
        if string.sub(ARGV[at + 2 + count], 1, 1) == 'e' then
            redis.call('EXPIRE', key, ARGV[1])
            local claim = redis.call('GET', KEYS[i + 1])
            if claim then
                redis.call('EXPIRE', claim, ARGV[1])
                redis.call('EXPIRE', KEYS[i + 1], ARGV[1])
            end
        end
        answer = 1
    end
    answers[#answers + 1] = answer
    at = at + 3 + count
end
return answers
