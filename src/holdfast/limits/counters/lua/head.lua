-- One call decides many counters at one moment. This file opens the script; one file per algorithm and tail.lua follow.
--
-- KEYS     the counters
-- ARGV[1]  msgpack: [terms, entries, adjustments]
--          terms        [[algorithm, epoch, version, limit, window ms, capacity, store], ...]
--          entries      [asks, key, terms, cost, times, want, hold, spent, key, ..., asks, ...]   flat: how many, then seven each
--          adjustments  [[key, terms, given, taken_at, charged, released, held, held_ms], ...]
-- returns  msgpack: [now ms, [[limit, epoch, version, capacity], ...], reading, reading, ...], six numbers per ask
--          admitted, remaining, reset ms, wait ms, leased, and 0 or which of the newer terms decided;
--          then for each adjustment 1 if it found what it puts right, else 0
--
-- A counter is one string: msgpack of epoch, version, limit, window, capacity (the newest terms it was counted by),
-- the algorithm's state, the store of the terms (0: any), whose stamps say nothing of another's, and the algorithm. Every
-- algorithm stores what is used, and has `peek` (bring to now; room, reset), `used`, `take`, `give`, `wait` and `cap`;
-- holdfast/limits/algorithms.py is their reference.

local call, pack, unpack_message = redis.call, cmsgpack.pack, cmsgpack.unpack
local ceil, floor, max, min = math.ceil, math.floor, math.max, math.min
local algorithms = {}
local EPSILON = 1e-6
local WAIT_MS_MIN = 1
local KEPT_MS_MAX = 1e13 -- three hundred years; far more, and SET refuses it and ends the script for everybody in it
