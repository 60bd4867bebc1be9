local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
local request = cmsgpack.unpack(ARGV[1])

local function newer(epoch, version, terms)
  return epoch > terms[2] or (epoch == terms[2] and version > terms[3])
end

-- The counter's algorithm, state and the newer of its own terms and the asker's; nil if `only_known` and there is none.
local function open(key, asked, only_known)
  local algorithm = algorithms[asked[1]]
  local raw = redis.call('GET', key)
  if not raw then
    if only_known then
      return nil
    end
    return algorithm, algorithm.fresh(), asked
  end
  local epoch, version, limit, window, capacity, state = cmsgpack.unpack(raw)
  if newer(epoch, version, asked) then
    return algorithm, state, { epoch = epoch, version = version, limit = limit, window = window, capacity = capacity }
  end
  return algorithm, state, asked
end

local function save(key, state, terms, reset)
  local packed = cmsgpack.pack(terms.epoch, terms.version, terms.limit, terms.window, terms.capacity, state)
  redis.call('SET', key, packed, 'PX', math.ceil(reset) + 1000)
end

-- Keep a counter and say how it stands; `refused_cost` is 0 if nothing was refused.
local function close(answers, key, algorithm, state, terms, admitted, refused_cost, leased)
  local room, reset = algorithm.peek(state, terms, now)
  save(key, state, terms, reset)
  local wait = 0
  if refused_cost > 0 then
    wait = refused_cost <= terms.capacity and algorithm.wait(state, terms, now, refused_cost) or terms.window
  end
  local n = #answers
  answers[n + 1] = admitted
  answers[n + 2] = math.max(0, math.floor(room + EPSILON))
  answers[n + 3] = reset
  answers[n + 4] = math.max(0, wait)
  answers[n + 5] = leased
  answers[n + 6] = terms.limit
  answers[n + 7] = terms.epoch
  answers[n + 8] = terms.version
end

-- An entry of one ask: as many of its equal costs as fit, then the lease if a tenth of the capacity stays free.
local function decide_one(answers, entry)
  local key, cost, times, want, hold = KEYS[entry[1]], entry[3], entry[4], entry[5], entry[6]
  local algorithm, state, terms = open(key, request[1][entry[2]])
  local room = algorithm.peek(state, terms, now) + EPSILON
  if hold ~= '' and state[hold] then
    room = 1
  end
  local admitted = times
  if cost * times > room then
    admitted = math.max(0, math.floor(room / cost))
  end
  if admitted > 0 then
    algorithm.take(state, terms, now, cost * admitted, hold)
  end
  local leased = 0
  if want > 0 and room - cost * times - want >= terms.capacity / 10 then
    algorithm.take(state, terms, now, want)
    leased = want
  end
  close(answers, key, algorithm, state, terms, admitted, admitted < times and cost or 0, leased)
end

-- An entry of several asks: all are checked, then all are taken, or none.
local function decide_all(answers, entry)
  local opened, all_fit = {}, true
  for at = 1, #entry, 6 do
    local algorithm, state, terms = open(KEYS[entry[at]], request[1][entry[at + 1]])
    local room = algorithm.peek(state, terms, now) + EPSILON
    local hold = entry[at + 5]
    local fits = entry[at + 2] <= room or (hold ~= '' and state[hold] ~= nil)
    all_fit = all_fit and fits
    opened[#opened + 1] = { algorithm, state, terms, fits, at }
  end
  for _, each in ipairs(opened) do
    local algorithm, state, terms, fits, at = each[1], each[2], each[3], each[4], each[5]
    local cost = entry[at + 2]
    if all_fit then
      algorithm.take(state, terms, now, cost, entry[at + 5])
    end
    close(answers, KEYS[entry[at]], algorithm, state, terms, all_fit and 1 or 0, fits and 0 or cost, 0)
  end
end

local function adjust(change)
  local key, given, taken_at, charged, released = KEYS[change[1]], change[3], change[4], change[5], change[6]
  local asked = request[1][change[2]]
  local algorithm, state, terms = open(key, asked, charged == 0)
  if not algorithm then
    return
  end
  algorithm.peek(state, terms, now)
  if released ~= '' then
    state[released] = nil
  elseif given > 0 and terms.epoch == asked[2] and terms.version == asked[3] then
    algorithm.give(state, terms, now, given, taken_at)
  elseif charged > 0 then
    algorithm.take(state, terms, now, charged)
  end
  local _, reset = algorithm.peek(state, terms, now)
  save(key, state, terms, reset)
end

for _, terms in ipairs(request[1]) do
  terms.epoch, terms.version, terms.limit, terms.window, terms.capacity = unpack(terms, 2)
end

local answers = { now }
for _, entry in ipairs(request[2]) do
  if #entry == 6 then
    decide_one(answers, entry)
  else
    decide_all(answers, entry)
  end
end
for _, change in ipairs(request[3]) do
  adjust(change)
end
return cmsgpack.pack(answers)
