-- Appends to many logs; each append alone is all or nothing.
-- KEYS: for each append the log
-- ARGV: seconds that a log lives after its end; then for each append its epoch, the number of its
--       first entry, how many entries, how many are in older epochs (-1: not known), the entries
-- Answers for each append 1, or if nothing was written the log's last id, or '' without a log.

-- Whether the log ends with the entry before this one. That it has so many entries says it too,
-- and costs a third, as long as the last epoch is this one: XADD refuses an id of an older one.
local function ends_before(key, epoch, n, entries_before)
    if entries_before >= 0 and redis.call('XLEN', key) == entries_before + n then return true end
    local last = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
    if not last then return false, '' end
    return last[1] == epoch .. (n - 1) and string.sub(last[2][2], 1, 1) ~= 'e', last[1]
end

local answers = {}
local at = 2
for i, key in ipairs(KEYS) do
    local epoch, n, count = ARGV[at] .. '-', tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
    local continues, answer = ends_before(key, epoch, n, tonumber(ARGV[at + 3]))
    if continues then
        local added = redis.pcall('XADD', key, 'NOMKSTREAM', epoch .. n, 'e', ARGV[at + 4])
        if type(added) == 'table' then
            if not string.find(added.err, 'equal or smaller', 1, true) then return added end
            answer = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1][1]
        else
            for j = 1, count - 1 do
                redis.call('XADD', key, 'NOMKSTREAM', epoch .. (n + j), 'e', ARGV[at + 4 + j])
            end
            if string.sub(ARGV[at + 3 + count], 1, 1) == 'e' then expire(key, ARGV[1]) end
            answer = 1
        end
    end
    answers[i] = answer
    at = at + 4 + count
end
return answers
