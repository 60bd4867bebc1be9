-- concurrency: at most `limit` holders at a time; one that does not come back is forgotten after the window.
-- state: hold -> until (ms)

local concurrency = { fresh = function() return {} end }

function concurrency.peek(state, terms, now)
  local holders, last = 0, now
  for hold, till in pairs(state) do
    if till <= now then
      state[hold] = nil
    else
      holders = holders + 1
      last = max(last, till)
    end
  end
  return terms.limit - holders, last - now
end

function concurrency.take(state, terms, now, amount, hold)
  state[hold] = now + terms.window
end

function concurrency.wait(state, terms, now, cost)
  local untils = {}
  for _, till in pairs(state) do
    untils[#untils + 1] = till
  end
  table.sort(untils)
  return untils[#untils + cost - terms.limit] - now
end

algorithms[4] = concurrency
