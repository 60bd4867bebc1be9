-- One step of a search for all logs and claims of an owner; deletes them.
-- ARGV: the cursor; how many keys to look at; the prefix of logs, of claims, and of the names of
--       claims; the owner's tenant, kind and name
-- Answers the next cursor ('0': it was the last step) and how many logs were deleted.
local logs, claims, names = ARGV[3], ARGV[4], ARGV[5]
local function is_owner(tenant, kind, name)
    return tenant == ARGV[6] and kind == ARGV[7] and name == ARGV[8]
end

local step = redis.call('SCAN', ARGV[1], 'COUNT', ARGV[2])
local deleted = 0
for _, key in ipairs(step[2]) do
    if string.sub(key, 1, #logs) == logs then
        local first = redis.call('XRANGE', key, '-', '+', 'COUNT', 1)[1]
        local begin = first and cmsgpack.unpack(string.sub(first[2][2], 2))
        if begin and is_owner(begin.owner_tenant, begin.owner_kind, begin.owner_name) then
            redis.call('DEL', key)
            deleted = deleted + 1
        end
    elseif string.sub(key, 1, #claims) == claims then
        local found = redis.call('GET', key)
        local claim = found and cmsgpack.unpack(found)
        if claim and is_owner(claim[1], claim[2], claim[3]) then
            redis.call('DEL', key, names .. claim[6])
        end
    end
end
return {step[1], deleted}
