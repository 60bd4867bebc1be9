-- The registry: one call, as holdfast/fanout/registry/memory.py does it, which is the reference; contract.py has the theory.
--
-- ARGV[1]  prefix of all keys
-- ARGV[2]  what is called
-- ARGV[3]  the time in microseconds for tests; '' is Redis TIME
-- ARGV[4]  msgpack, by ARGV[2]:
--          register     [gateway, highest time this node was given, devices max, [[user, device, connection, since, opened], ...]]
--          unregister   [gateway, highest time this node was given, [[user, device, connection], ...]]
--          renew        [gateway, live, highest time this node was given]
--          connections  [gateway, cursor, count]
--          dead         [live]
--          drop         [gateway, highest time this node was given, count, live; 0: although it lives]
--          lookup       [user, ...]
-- returns  msgpack:
--          register     [[since, ...], [[gateway, connection], ...], [[user, at], ...]]
--          unregister   [[user, at], ...]
--          renew        [changes, [connection, ...], gateways, at]
--          connections  [cursor, [[user, device, connection, since], ...]]
--          dead         [gateway, ...]
--          drop         [whether more is left, [[user, at], ...]]
--          lookup       [[gateway, ...], ...]
--
-- `live` is in microseconds; a user is its tenant, NUL and id. Under the prefix:
--   renewed, changes           hash: gateway -> the time of its renewal, calls that changed its connections
--   users:<gateway>            set: users with a connection to it
--   displaced:<gateway>        set: its connections that were displaced and that it has not unregistered
--   devices:<user>             hash: device -> msgpack [gateway, connection, since]

local call, pack, unpack_message = redis.call, cmsgpack.pack, cmsgpack.unpack
local prefix, verb, arguments = ARGV[1], ARGV[2], unpack_message(ARGV[4])
local renewed, changes = prefix .. 'renewed', prefix .. 'changes'

local now = tonumber(ARGV[3])
if not now then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

local function text(number)
  return string.format('%.0f', number)
end

local function lives(gateway, live)
  return now - tonumber(call('HGET', renewed, gateway) or '0') < live
end

-- Garbage under a user's key is removed: it must not stop the calls for all others.
local function devices_of(user)
  local key, found, count = prefix .. 'devices:' .. user, {}, 0
  local raw = redis.pcall('HGETALL', key)
  if raw.err then
    call('DEL', key)
    return found, count
  end
  for i = 1, #raw, 2 do
    local is_read, entry = pcall(unpack_message, raw[i + 1])
    if is_read and type(entry) == 'table' and type(entry[3]) == 'number' then
      found[raw[i]] = entry
      count = count + 1
    else
      call('HDEL', key, raw[i])
    end
  end
  return found, count
end

local function release(user, devices, gateway)
  for _, entry in pairs(devices) do
    if entry[1] == gateway then
      return
    end
  end
  call('SREM', prefix .. 'users:' .. gateway, user)
end

local function displace(displaced, gateway, connection)
  displaced[#displaced + 1] = { gateway, connection }
  if call('HEXISTS', renewed, gateway) == 1 then
    call('SADD', prefix .. 'displaced:' .. gateway, connection)
  end
end

local function oldest(devices)
  local found
  for device, entry in pairs(devices) do
    if not found or entry[3] < devices[found][3] then
      found = device
    end
  end
  return found
end

local function changing(gateway)
  call('HSET', renewed, gateway, text(now))
  call('HINCRBY', changes, gateway, 1)
end

local verbs = {}

function verbs.register()
  local gateway, last, devices_max = arguments[1], arguments[2], arguments[3]
  local since, displaced, online = {}, {}, {}
  changing(gateway)
  for number, connection in ipairs(arguments[4]) do
    local user, device, id, stamp = connection[1], connection[2], connection[3], connection[4]
    local key = prefix .. 'devices:' .. user
    local devices, count = devices_of(user)
    local highest, opened = 0, connection[5]
    for _, entry in pairs(devices) do
      highest = math.max(highest, entry[3])
    end
    last = math.max(last, highest)
    if stamp == 0 and opened < now and highest <= now then
      stamp = opened
    end
    if stamp == 0 then
      last = math.max(now, last + 1)
      stamp = last
    end
    last = math.max(last, stamp)
    if count == 0 then
      last = math.max(now, last + 1)
      online[#online + 1] = { user, last }
    end
    local old = devices[device]
    if old and old[2] == id then
      stamp = math.max(stamp, old[3])
      old[3] = stamp
      call('HSET', key, device, pack(old))
    elseif old and old[3] > stamp then
      displace(displaced, gateway, id)
    else
      devices[device] = { gateway, id, stamp }
      call('HSET', key, device, pack(devices[device]))
      call('SADD', prefix .. 'users:' .. gateway, user)
      local gone = {}
      if old then
        gone[1] = old
      else
        count = count + 1
      end
      while count > devices_max do
        local least = oldest(devices)
        gone[#gone + 1] = devices[least]
        devices[least] = nil
        call('HDEL', key, least)
        count = count - 1
      end
      for _, entry in ipairs(gone) do
        release(user, devices, entry[1])
        displace(displaced, entry[1], entry[2])
      end
    end
    since[number] = stamp
  end
  return { since, displaced, online }
end

function verbs.unregister()
  local gateway, last, offline = arguments[1], arguments[2], {}
  changing(gateway)
  for _, connection in ipairs(arguments[3]) do
    local user, device, id = connection[1], connection[2], connection[3]
    call('SREM', prefix .. 'displaced:' .. gateway, id)
    local devices, count = devices_of(user)
    local entry = devices[device]
    if entry and entry[1] == gateway and entry[2] == id then
      last, count = math.max(last, entry[3]), count - 1
      devices[device] = nil
      call('HDEL', prefix .. 'devices:' .. user, device)
      release(user, devices, gateway)
    end
    if count == 0 then
      last = math.max(now, last + 1)
      offline[#offline + 1] = { user, last }
    end
  end
  return offline
end

function verbs.renew()
  local gateway, living = arguments[1], 0
  if not lives(gateway, arguments[2]) then
    call('HDEL', changes, gateway)
  end
  call('HSET', renewed, gateway, text(now))
  for _, name in ipairs(call('HKEYS', renewed)) do
    if lives(name, arguments[2]) then
      living = living + 1
    end
  end
  local displaced = call('SMEMBERS', prefix .. 'displaced:' .. gateway)
  return { tonumber(call('HGET', changes, gateway) or '0'), displaced, living, math.max(now, arguments[3] + 1) }
end

function verbs.connections()
  local gateway = arguments[1]
  local page = call('SSCAN', prefix .. 'users:' .. gateway, arguments[2], 'COUNT', arguments[3])
  local found = {}
  for _, user in ipairs(page[2]) do
    for device, entry in pairs((devices_of(user))) do
      if entry[1] == gateway then
        found[#found + 1] = { user, device, entry[2], entry[3] }
      end
    end
  end
  return { page[1], found }
end

-- A renewal in the future is one by a clock that has gone back since: it counts from now on.
function verbs.dead()
  local found = {}
  for _, name in ipairs(call('HKEYS', renewed)) do
    if tonumber(call('HGET', renewed, name)) > now then
      call('HSET', renewed, name, text(now))
    elseif not lives(name, arguments[1]) then
      found[#found + 1] = name
    end
  end
  return found
end

function verbs.drop()
  local gateway, last, count, live, offline = arguments[1], arguments[2], arguments[3], arguments[4], {}
  if live > 0 and lives(gateway, live) then
    return { false, offline }
  end
  call('HDEL', changes, gateway)
  for _, user in ipairs(call('SPOP', prefix .. 'users:' .. gateway, count)) do
    local devices, left = devices_of(user)
    for device, entry in pairs(devices) do
      last = math.max(last, entry[3])
      if entry[1] == gateway then
        call('HDEL', prefix .. 'devices:' .. user, device)
        left = left - 1
      end
    end
    if left == 0 then
      last = math.max(now, last + 1)
      offline[#offline + 1] = { user, last }
    end
  end
  if call('EXISTS', prefix .. 'users:' .. gateway) == 1 then
    return { true, offline }
  end
  call('HDEL', renewed, gateway)
  call('DEL', prefix .. 'displaced:' .. gateway)
  return { false, offline }
end

function verbs.lookup()
  local found = {}
  for number, user in ipairs(arguments) do
    local gateways = {}
    for _, entry in pairs((devices_of(user))) do
      gateways[#gateways + 1] = entry[1]
    end
    found[number] = gateways
  end
  return found
end

return pack(verbs[verb]())
