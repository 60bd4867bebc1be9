-- concurrency: at most `limit` holders at a time; one that does not come back is forgotten after the window.
-- state: hold -> until (ms); AT -> when it was last looked at (ms), so that a clock that stepped back takes all along

local AT = '' -- no hold has this name
local concurrency = { fresh = function() return {} end }

function concurrency.peek(state, terms, now)
  local holders, last, back = 0, now, max(0, (state[AT] or now) - now)
  for hold, till in pairs(state) do
    till = till - back
    if hold == AT or till <= now then
      state[hold] = nil
    else
      state[hold] = till
      holders = holders + 1
      last = max(last, till)
    end
  end
  state[AT] = now
  return terms.limit - holders, last - now
end

function concurrency.cap() -- who holds goes on holding, also above a lower limit
end

function concurrency.take(state, terms, now, amount, hold)
  if hold and hold ~= '' then -- who asks by an older rule, of another algorithm, takes no place
    state[hold] = now + terms.window
  end
end

function concurrency.wait(state, terms, now, cost)
  local untils = {}
  for hold, till in pairs(state) do
    if hold ~= AT then
      untils[#untils + 1] = till
    end
  end
  table.sort(untils)
  local over = #untils + cost - terms.limit
  return over > 0 and untils[over] - now or 0
end

algorithms[4] = concurrency
