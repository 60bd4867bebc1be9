local time = call('TIME')
local now = time[1] * 1000 + time[2] / 1000
local request = unpack_message(ARGV[1])
local entries = request[2]
local newer = {}
local answers = { now, newer }

-- The state to go on with under newer terms: what is used carries over, up to their capacity. Holds are something else.
local function carried_over(before, old, state, asked)
  local new = algorithms[asked[1]]
  if old == new then
    new.peek(state, asked, now)
  elseif old == concurrency or new == concurrency then
    return new, new.fresh()
  else
    old.peek(state, before, now)
    local used = old.used(state, now)
    state = new.fresh()
    new.peek(state, asked, now)
    new.take(state, asked, now, used)
  end
  new.cap(state, asked, now)
  return new, state
end

-- The counter's algorithm, state, the terms that decide (its own if they are newer and of the asker's store, else the
-- asker's), and whether it was counted by the asker's; nil if `only_known` and there is none. With `as_it_is` its own
-- terms decide whichever is newer.
local function open(key, asked, only_known, as_it_is)
  local raw = call('GET', key)
  if not raw then
    if only_known then
      return nil
    end
    local algorithm = algorithms[asked[1]]
    return algorithm, algorithm.fresh(), asked
  end
  local epoch, version, limit, window, capacity, state, store, code = unpack_message(raw)
  if epoch == asked.epoch and version == asked.version and store == asked.store then
    return algorithms[code], state, asked, true
  end
  local own = { code, epoch = epoch, version = version, limit = limit, window = window, capacity = capacity, store = store }
  if as_it_is then
    return algorithms[code], state, own
  end
  local newer_stamp = epoch > asked.epoch or (epoch == asked.epoch and version > asked.version)
  if newer_stamp and (store == asked.store or store == 0 or asked.store == 0) then
    newer[#newer + 1] = { limit, epoch, version, capacity }
    own.newer = #newer
    return algorithms[code], state, own
  end
  local algorithm, carried = carried_over(own, algorithms[code], state, asked)
  return algorithm, carried, asked
end

local function save(key, state, terms, reset)
  call('SET', key, pack(terms.epoch, terms.version, terms.limit, terms.window, terms.capacity, state, terms.store,
    terms[1]), 'PX', min(ceil(reset), KEPT_MS_MAX) + 1000)
end

-- Keep a counter and say how it stands; `refused_cost` is 0 if nothing was refused.
local function close(key, algorithm, state, terms, admitted, refused_cost, leased)
  local room, reset = algorithm.peek(state, terms, now)
  save(key, state, terms, reset)
  local wait = 0
  if refused_cost > 0 then
    wait = refused_cost <= terms.capacity and algorithm.wait(state, terms, now, refused_cost) or terms.window
    wait = max(WAIT_MS_MIN, wait)
  end
  local n = #answers
  answers[n + 1] = admitted
  answers[n + 2] = max(0, floor(room + EPSILON))
  answers[n + 3] = reset
  answers[n + 4] = wait
  answers[n + 5] = leased
  answers[n + 6] = terms.newer
end

-- One ask: as many of its equal costs as fit, of what is spent already all; then the lease if a tenth of the capacity
-- stays free.
local function decide_one(at)
  local key, asked, cost, times, want, hold, spent = unpack(entries, at, at + 6)
  key = KEYS[key]
  local algorithm, state, terms = open(key, request[1][asked])
  local room = algorithm.peek(state, terms, now) + EPSILON
  if hold ~= '' and state[hold] then
    room = 1
  end
  local admitted = times
  if cost * times > room and cost > 0 then -- a negative cost gives back, and always fits
    admitted = max(0, floor(room / cost))
  end
  local taken = max(admitted, spent)
  if taken > 0 then
    algorithm.take(state, terms, now, cost * taken, hold)
  end
  local leased = 0
  if want > 0 and room - cost * times - want >= terms.capacity / 10 then
    algorithm.take(state, terms, now, want)
    leased = want
  end
  close(key, algorithm, state, terms, admitted, admitted < times and cost or 0, leased)
end

-- Several asks: all are checked, then all are taken, or none.
local function decide_all(first, count)
  local opened, all_fit = {}, true
  for n = 1, count do
    local key, asked, cost, _, _, hold = unpack(entries, first + 7 * (n - 1), first + 7 * n - 2)
    local algorithm, state, terms = open(KEYS[key], request[1][asked])
    local room = algorithm.peek(state, terms, now) + EPSILON
    local fits = cost <= room or (hold ~= '' and state[hold] ~= nil)
    all_fit = all_fit and fits
    opened[n] = { KEYS[key], algorithm, state, terms, fits, cost, hold }
  end
  for _, each in ipairs(opened) do
    local key, algorithm, state, terms, fits, cost, hold = unpack(each)
    if all_fit then
      algorithm.take(state, terms, now, cost, hold)
    end
    close(key, algorithm, state, terms, all_fit and 1 or 0, fits and 0 or cost, 0)
  end
end

-- Put one counter right; 1 if there was what it puts right, else 0.
local function adjust(change)
  local key, asked = KEYS[change[1]], request[1][change[2]]
  local given, taken_at, charged, released, held, held_ms = unpack(change, 3)
  local algorithm, state, terms, counted_by = open(key, asked, charged == 0 and held == '', released ~= '')
  if not algorithm or (given > 0 and not counted_by) then
    return 0
  end
  local room, found = algorithm.peek(state, terms, now), 1
  if (algorithm == concurrency) == (given + charged ~= 0) then -- what another algorithm counts is not found
    found = 0
  elseif released ~= '' then
    found = state[released] and 1 or 0
    state[released] = nil
  elseif held ~= '' then
    state[held] = now + held_ms
  elseif given > 0 then
    algorithm.give(state, terms, now, given, taken_at)
  else
    algorithm.take(state, terms, now, min(charged, max(0, floor(room + EPSILON))))
  end
  local _, reset = algorithm.peek(state, terms, now)
  save(key, state, terms, reset)
  return found
end

for _, terms in ipairs(request[1]) do
  terms.epoch, terms.version, terms.limit, terms.window, terms.capacity, terms.store = unpack(terms, 2)
  terms.newer = 0
end

local at, last = 1, #entries
while at <= last do
  local count = entries[at]
  if count == 1 then
    decide_one(at + 1)
  else
    decide_all(at + 1, count)
  end
  at = at + 1 + 7 * count
end
for _, change in ipairs(request[3]) do
  answers[#answers + 1] = adjust(change)
end
return pack(answers)
