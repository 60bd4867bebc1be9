-- fixed_window: `limit` in each window. Under a new length, all that counts now was used in the new current window.
-- state: [1] used, [2] begins (ms), [3] ends (ms)

local fixed_window = { fresh = function() return { 0, 0, 0 } end }

function fixed_window.peek(state, terms, now)
  if now >= state[3] then
    state[1] = 0
  end
  if now >= state[3] or now < state[2] or state[3] ~= state[2] + terms.window then
    state[2] = floor(now / terms.window) * terms.window
    state[3] = state[2] + terms.window
  end
  return terms.limit - state[1], state[1] > 0 and state[3] - now or 0
end

function fixed_window.used(state)
  return state[1]
end

function fixed_window.cap(state, terms)
  state[1] = min(state[1], terms.limit)
end

function fixed_window.take(state, terms, now, amount) -- a negative amount gives back
  state[1] = max(0, state[1] + amount)
end

function fixed_window.give(state, terms, now, amount, taken_at)
  if taken_at >= state[2] then
    state[1] = max(0, state[1] - amount)
  end
end

function fixed_window.wait(state, terms, now, cost)
  return state[3] - now
end

algorithms[2] = fixed_window
