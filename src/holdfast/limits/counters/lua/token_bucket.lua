-- token_bucket: `capacity` at once, drained at limit / window.
-- state: [1] used, [2] at (ms)

local token_bucket = { fresh = function() return { 0, 0 } end }

-- Drain to `now`; returns the room and the milliseconds until nothing is used.
function token_bucket.peek(state, terms, now)
  if now > state[2] then
    state[1] = max(0, state[1] - (now - state[2]) * terms.limit / terms.window)
  end
  state[2] = now
  return terms.capacity - state[1], state[1] * terms.window / terms.limit
end

function token_bucket.used(state)
  return state[1]
end

function token_bucket.cap(state, terms)
  state[1] = min(state[1], terms.capacity)
end

function token_bucket.take(state, terms, now, amount) -- a negative amount gives back
  state[1] = max(0, state[1] + amount)
end

function token_bucket.give(state, terms, now, amount, taken_at)
  local drained = max(0, now - taken_at) * terms.limit / terms.window
  state[1] = max(0, state[1] - max(0, amount - drained))
end

function token_bucket.wait(state, terms, now, cost)
  return (state[1] + cost - terms.capacity) * terms.window / terms.limit
end

algorithms[1] = token_bucket
