-- sliding_window: `limit` in any window, estimated: the last window's use fades as the current one goes on.
-- state: [1] used, [2] previous, [3] start (ms), [4] length (ms; 0: not begun)

local sliding_window = { fresh = function() return { 0, 0, 0, 0 } end }

local function faded(state, now)
  return state[2] * (1 - max(0, now - state[3]) / state[4])
end

function sliding_window.peek(state, terms, now)
  if state[4] == 0 then
    state[4] = terms.window
  end
  local elapsed = now - state[3]
  if elapsed >= state[4] then
    state[2] = elapsed < 2 * state[4] and state[1] or 0
    state[1] = 0
    state[3] = floor(now / state[4]) * state[4]
  end
  if elapsed < 0 or state[4] ~= terms.window then -- all that counts now was used in the new current window
    state[1] = state[1] + faded(state, now)
    state[2] = 0
    state[4] = terms.window
    state[3] = floor(now / terms.window) * terms.window
  end
  local reset = 0
  if state[1] > 0 then
    reset = state[3] + 2 * state[4] - now
  elseif state[2] > 0 then
    reset = state[3] + state[4] - now
  end
  return terms.limit - state[1] - faded(state, now), reset
end

function sliding_window.used(state, now)
  return state[1] + faded(state, now)
end

function sliding_window.cap(state, terms, now) -- what is above the limit goes from the last window first
  state[1] = min(state[1], terms.limit)
  state[2] = min(state[2], (terms.limit - state[1]) / (1 - max(0, now - state[3]) / state[4]))
end

function sliding_window.take(state, terms, now, amount) -- a negative amount gives back
  state[1] = max(0, state[1] + amount)
end

function sliding_window.give(state, terms, now, amount, taken_at)
  if taken_at >= state[3] then
    state[1] = max(0, state[1] - amount)
  end
end

function sliding_window.wait(state, terms, now, cost)
  local left = terms.limit - state[1] - cost
  if left >= 0 then
    return state[3] + state[4] * (1 - left / state[2]) - now
  end
  return state[3] + state[4] + state[4] * max(0, 1 - (terms.limit - cost) / state[1]) - now
end

algorithms[3] = sliding_window
