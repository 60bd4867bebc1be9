-- The pool of active generations and its fair queue: one call, as holdfast/streaming/fair_queue.py does it, which is the
-- reference and has the theory. A test compares the two call by call. Everything here is constant time, or a logarithm.
--
-- KEYS[1]  the state
-- ARGV[1]  prefix of all keys and channels
-- ARGV[2]  node that calls
-- ARGV[3]  'call', 'beat', 'announce' or 'leave'
-- ARGV[4]  msgpack: [total, {pool: size}, waiting max, waiting per tenant, waiting per user]
-- ARGV[5]  msgpack, by ARGV[3]:
--          call      [[1 admit, id, tenant, user, limit, pool, crc, at head, capped, waiting max], [2 confirm, id],
--                    [3 move, id, pool], [4 release, id], [5 cancel elsewhere, id, node], [6 locate, id], ...]
--          beat      [leases, sum, waiting, sum, {id read here: its node}, [id whose position is asked for, ...]]
--          announce  [leases, waiting], each [[id, tenant, user, limit, pool, crc, at head], ...]
-- ARGV[6]  the time in ms for tests; '' is Redis TIME
-- returns  msgpack: [what was taken from nodes {cause: count}, answer]
--          call      [answer, ...]: to 1 and 3: -1 leased, n position, or who is full; 2, 4, 5: a boolean; 6: a node or ''
--          beat, announce  the view, in the order of PoolView
--
-- Tenants and users come as hashes. Under the prefix:
--   pool:state            msgpack: time, counts, nodes, and the ring of pools
--   pool:entries          hash: id -> msgpack of the entry
--   pool:users            hash: user -> msgpack: active, limit, waiting, and its lists: [[pool, length, in ring], ...]
--   pool:waiting          hash: tenant -> how many wait
--   pool:tenants:<pool>   sorted set: the ring of tenants           pool:ids:<node>      set: all its ids
--   pool:ring:<pool>:<tenant>  sorted set: the ring of its users    pool:granted:<node>  sorted set: the oldest first
--   pool:list:<pool>:<user>    sorted set: its ids by place         pool:aside:<node>    sorted set: by missed turn
--   readers:<node>  hash: id -> when it was last read elsewhere     cancels:<node>  set: ids to cancel

local call, pack, unpack_message = redis.call, cmsgpack.pack, cmsgpack.unpack
local max, min, floor = math.max, math.min, math.floor
local CONFIRM, DEAD, FRESH, QUIET, READ, REBUILD = 2000, 10000, 2500, 2000, 3000, 3000
local PASSED_OVER_MAX, SWEEP_MAX = 16, 1000
local RATE_BUCKET, RATE_BUCKETS, RATE_GRANTS_MIN = 5000, 6, 5
local GONE, WAITING, SET_ASIDE, GRANTED, LEASED = 0, 1, 2, 3, 4

local PREFIX, ME = ARGV[1], ARGV[2]
local ENTRIES, USERS, TENANTS_WAITING = PREFIX .. 'pool:entries', PREFIX .. 'pool:users', PREFIX .. 'pool:waiting'
local TENANTS, RING, LIST = PREFIX .. 'pool:tenants:', PREFIX .. 'pool:ring:', PREFIX .. 'pool:list:'
local IDS, GRANTS, ASIDE = PREFIX .. 'pool:ids:', PREFIX .. 'pool:granted:', PREFIX .. 'pool:aside:'
local READERS, CANCELS, WAKE = PREFIX .. 'readers:', PREFIX .. 'cancels:', PREFIX .. 'wake:'

local settings, body = unpack_message(ARGV[4]), unpack_message(ARGV[5])
local total, sizes = settings[1], settings[2]
local users, freed = {}, {}
local passed_over, granted, has_freed = 0, 0, false
local state, now

-- Time and state

local function open_state()
  local raw = call('GET', KEYS[1])
  state = raw and unpack_message(raw) or {
    now = 0, skew = 0, nobody_dead_until = 0, no_grants_until = 0, head = 0, tail = 0, turn = 0,
    active_total = 0, waiting_total = 0, active = {}, waiting = {}, rate = {}, rings = {}, nodes = {},
  }
  if ARGV[6] == '' then
    local time = call('TIME')
    now = time[1] * 1000 + floor(time[2] / 1000)
  else
    now = tonumber(ARGV[6])
  end
  state.skew = max(state.skew, state.now - now)
  now = now + state.skew
  if not state.id then
    state.id = string.format('%.0f', now)
    state.no_grants_until = now + REBUILD
  elseif now - state.now > QUIET then
    state.nobody_dead_until = now + DEAD
  end
  state.now = now
end

local function next_turn()
  state.turn = state.turn + 1
  return state.turn
end

local function add(counts, name, by)
  local count = (counts[name] or 0) + by
  counts[name] = count ~= 0 and count or nil
end

local function node_of(name)
  local node = state.nodes[name]
  if not node then
    node = { beat = now, blocked = false, leases = 0, leases_sum = 0, waiting = 0, waiting_sum = 0, granted = 0, aside = 0, due = 0 }
    state.nodes[name] = node
  end
  return node
end

local function node_names()
  local names = {}
  for name in pairs(state.nodes) do
    names[#names + 1] = name
  end
  table.sort(names)
  return names
end

local function user_of(key, tenant)
  local user = users[key]
  if not user then
    local raw = call('HGET', USERS, key)
    user = { key = key, tenant = tenant, active = 0, limit = 0, waiting = 0, lists = {} }
    if raw then
      user.active, user.limit, user.waiting, user.lists = unpack_message(raw)
    end
    users[key] = user
  end
  return user
end

local function close_state()
  for key, user in pairs(users) do
    if user.active == 0 and user.waiting == 0 then
      call('HDEL', USERS, key)
    else
      call('HSET', USERS, key, pack(user.active, user.limit, user.waiting, user.lists))
    end
  end
  call('SET', KEYS[1], pack(state))
end

-- Entries

local function entry_of(id)
  local raw = call('HGET', ENTRIES, id)
  if not raw then
    return nil
  end
  local entry = { id = id }
  entry.tenant, entry.user, entry.node, entry.pool, entry.state, entry.crc, entry.place, entry.till, entry.cancelled =
    unpack_message(raw)
  return entry
end

local function save(entry)
  call('HSET', ENTRIES, entry.id, pack(entry.tenant, entry.user, entry.node, entry.pool, entry.state, entry.crc, entry.place,
    entry.till, entry.cancelled))
end

local function own(node, id)
  local entry = entry_of(id)
  return entry and entry.node == node and entry or nil
end

local function new_entry(node, id, tenant, user, pool, crc)
  call('SADD', IDS .. node, id)
  return { id = id, tenant = tenant, user = user, node = node, pool = pool, state = GONE, crc = crc, place = 0, till = 0, cancelled = false }
end

-- Rings

local function ring_at(pool)
  for at, name in ipairs(state.rings) do
    if name == pool then
      return at
    end
  end
end

local function list_of(user, pool)
  for _, list in ipairs(user.lists) do
    if list[1] == pool then
      return list
    end
  end
end

local function count_list(user, pool, by)
  local list = list_of(user, pool)
  if not list then
    list = { pool, 0, false }
    user.lists[#user.lists + 1] = list
    table.sort(user.lists, function(a, b) return a[1] < b[1] end)
  end
  list[2] = list[2] + by
end

local function join_ring(pool, user)
  call('ZADD', RING .. pool .. ':' .. user.tenant, next_turn(), user.key)
  call('ZADD', TENANTS .. pool, 'NX', next_turn(), user.tenant)
  if not ring_at(pool) then
    state.rings[#state.rings + 1] = pool
  end
end

local function leave_ring(pool, user)
  local ring = RING .. pool .. ':' .. user.tenant
  call('ZREM', ring, user.key)
  if call('EXISTS', ring) == 0 then
    call('ZREM', TENANTS .. pool, user.tenant)
    if call('EXISTS', TENANTS .. pool) == 0 then
      table.remove(state.rings, ring_at(pool))
    end
  end
end

-- Each pool's ring has the user if it waits there and is below its limit.
local function place_in_rings(user)
  local below_limit = user.limit == 0 or user.active < user.limit
  local lists, at = user.lists, 1
  while at <= #lists do
    local list = lists[at]
    local belongs = below_limit and list[2] > 0
    if belongs and not list[3] then
      join_ring(list[1], user)
    elseif list[3] and not belongs then
      leave_ring(list[1], user)
    end
    list[3] = belongs
    if list[2] == 0 then
      table.remove(lists, at)
    else
      at = at + 1
    end
  end
end

-- A grant is active, but its node knows it as waiting until it confirms.
local function count(entry, user, by)
  if entry.state == GONE then
    return
  end
  local node = state.nodes[entry.node]
  if entry.state >= GRANTED then
    state.active_total = state.active_total + by
    user.active = user.active + by
    add(state.active, entry.pool, by)
  else
    state.waiting_total = state.waiting_total + by
    user.waiting = user.waiting + by
    add(state.waiting, entry.pool, by)
    if call('HINCRBY', TENANTS_WAITING, user.tenant, by) == 0 then
      call('HDEL', TENANTS_WAITING, user.tenant)
    end
  end
  if entry.state == LEASED then
    node.leases = node.leases + by
    node.leases_sum = node.leases_sum + by * entry.crc
  else
    node.waiting = node.waiting + by
    node.waiting_sum = node.waiting_sum + by * entry.crc
  end
end

local function leave(entry, user)
  local node = state.nodes[entry.node]
  count(entry, user, -1)
  if entry.state == WAITING then
    call('ZREM', LIST .. entry.pool .. ':' .. entry.user, entry.id)
    count_list(user, entry.pool, -1)
  elseif entry.state == GRANTED then
    call('ZREM', GRANTS .. entry.node, entry.id)
    node.granted = node.granted - 1
  elseif entry.state == SET_ASIDE then
    call('ZREM', ASIDE .. entry.node, entry.id)
    node.aside = node.aside - 1
  end
end

local function join_list(entry, user, at_head)
  if at_head then
    state.head = state.head - 1
    entry.place = state.head
  else
    state.tail = state.tail + 1
    entry.place = state.tail
  end
  call('ZADD', LIST .. entry.pool .. ':' .. entry.user, entry.place, entry.id)
  count_list(user, entry.pool, 1)
end

-- To another state, with all that both states count. The caller saves the entry.
local function change(entry, to, at_head)
  local user, node = user_of(entry.user, entry.tenant), state.nodes[entry.node]
  leave(entry, user)
  entry.state = to
  if to == WAITING then
    join_list(entry, user, at_head)
  elseif to == GRANTED then
    entry.till = now + CONFIRM
    node.due = node.granted > 0 and node.due or entry.till
    node.granted = node.granted + 1
    call('ZADD', GRANTS .. entry.node, next_turn(), entry.id)
  elseif to == SET_ASIDE then
    node.aside = node.aside + 1
    call('ZADD', ASIDE .. entry.node, next_turn(), entry.id)
  end
  count(entry, user, 1)
  place_in_rings(user)
end

local function delay_user(entry)
  call('ZADD', RING .. entry.pool .. ':' .. entry.tenant, 'XX', next_turn(), entry.user)
end

local function end_turn(entry)
  local at = ring_at(entry.pool)
  if at then
    table.remove(state.rings, at)
    state.rings[#state.rings + 1] = entry.pool
    call('ZADD', TENANTS .. entry.pool, 'XX', next_turn(), entry.tenant)
    delay_user(entry)
  end
end

local function take_out(entry)
  has_freed = has_freed or entry.state >= GRANTED
  change(entry, GONE)
end

local function forget(entry)
  take_out(entry)
  call('HDEL', ENTRIES, entry.id)
  call('SREM', IDS .. entry.node, entry.id)
  if entry.cancelled then
    call('SREM', CANCELS .. entry.node, entry.id)
  end
end

local function forget_node(name)
  state.nodes[name] = nil
  call('DEL', READERS .. name)
end

-- The grant loop

local function wake(entry, word)
  call('PUBLISH', WAKE .. entry.node, 'queue:results:' .. entry.id .. ' ' .. word)
end

local function has_room(pool)
  return state.active_total < total and (state.active[pool] or 0) < (sizes[pool] or total)
end

local function next_entry()
  for _, pool in ipairs(state.rings) do
    if has_room(pool) then
      local tenant = call('ZRANGE', TENANTS .. pool, 0, 0)[1]
      local user = call('ZRANGE', RING .. pool .. ':' .. tenant, 0, 0)[1]
      return entry_of(call('ZRANGE', LIST .. pool .. ':' .. user, 0, 0)[1])
    end
  end
end

local function begin_grant(entry)
  change(entry, GRANTED)
  wake(entry, 'SIGNAL:DONE')
end

local function grant()
  has_freed = false
  if now < state.no_grants_until then
    return
  end
  while passed_over < PASSED_OVER_MAX and granted < SWEEP_MAX do
    local entry = next_entry()
    if not entry then
      return
    end
    local node = state.nodes[entry.node]
    if not node.blocked and now - node.beat <= FRESH then
      granted = granted + 1
      begin_grant(entry)
      end_turn(entry)
      add(state.rate, floor(now / RATE_BUCKET), 1)
    else
      passed_over = passed_over + 1
      change(entry, SET_ASIDE)
    end
    save(entry)
  end
end

local function grant_what_was_freed()
  if has_freed then
    grant()
  end
end

-- Late grants and dead nodes

local function take_back(entry)
  change(entry, WAITING, true)
  delay_user(entry)
  save(entry)
  has_freed = true
  add(freed, 'unconfirmed', 1)
end

local function next_dead()
  if now < state.nobody_dead_until then
    return nil
  end
  local oldest
  for _, name in ipairs(node_names()) do
    if not oldest or state.nodes[name].beat < state.nodes[oldest].beat then
      oldest = name
    end
  end
  return oldest and now - state.nodes[oldest].beat > DEAD and oldest or nil
end

local function sorted_ids(node)
  local ids = call('SMEMBERS', IDS .. node)
  table.sort(ids)
  return ids
end

local function sweep()
  local swept = 0
  for _, name in ipairs(node_names()) do
    local node = state.nodes[name]
    while node.granted > 0 and node.due <= now and swept < SWEEP_MAX do
      local entry = entry_of(call('ZRANGE', GRANTS .. name, 0, 0)[1])
      if entry.till > now then
        node.due = entry.till
      else
        node.blocked = true
        take_back(entry)
        swept = swept + 1
      end
    end
  end
  while swept < SWEEP_MAX do
    local dead = next_dead()
    if not dead then
      return
    end
    local ids = sorted_ids(dead)
    for at = 1, min(#ids, SWEEP_MAX - swept) do
      forget(entry_of(ids[at]))
      add(freed, 'node_dead', 1)
      swept = swept + 1
      ids[at] = nil
    end
    if next(ids) == nil then
      forget_node(dead)
    end
  end
end

-- The node sent a heartbeat: it gets grants, and what was set aside returns to its old place in its list.
local function refresh()
  local node = node_of(ME)
  node.beat, node.blocked = now, false
  if node.aside == 0 then
    return node
  end
  local returning = {}
  for _, id in ipairs(call('ZRANGE', ASIDE .. ME, 0, -1)) do
    local entry = entry_of(id)
    entry.state = WAITING
    call('ZADD', LIST .. entry.pool .. ':' .. entry.user, entry.place, id)
    count_list(user_of(entry.user, entry.tenant), entry.pool, 1)
    save(entry)
    returning[#returning + 1] = entry
  end
  call('DEL', ASIDE .. ME)
  node.aside = 0
  for _, entry in ipairs(returning) do
    place_in_rings(users[entry.user])
  end
  return node
end

-- Operations

-- At most how many grants its pool gives up to its own: see fair_rings.
local function position_at(entry, rank)
  local tenants = call('ZCARD', TENANTS .. entry.pool)
  local ring = call('ZCARD', RING .. entry.pool .. ':' .. entry.tenant)
  return max(1, min(max(1, tenants) * max(1, ring) * rank, state.waiting[entry.pool] or 0))
end

local function answer(entry)
  if entry.state == LEASED then
    return -1
  end
  local list = list_of(user_of(entry.user, entry.tenant), entry.pool)
  local is_first = entry.state ~= WAITING or list[2] == 1
    or call('ZRANGE', LIST .. entry.pool .. ':' .. entry.user, 0, 0)[1] == entry.id
  return position_at(entry, is_first and 1 or list[2])
end

local function may_lease(user, pool)
  return now >= state.no_grants_until and (user.limit == 0 or user.active < user.limit) and has_room(pool)
    and not ring_at(pool)
end

local function full(user, capped, waiting_max)
  if not capped then
    return nil
  elseif user.waiting >= (waiting_max > 0 and waiting_max or settings[5]) then
    return 'user'
  elseif tonumber(call('HGET', TENANTS_WAITING, user.tenant) or 0) >= settings[4] then
    return 'tenant'
  elseif state.waiting_total >= settings[3] then
    return 'queue'
  end
end

local function lease_or_wait(entry, user, at_head)
  if may_lease(user, entry.pool) then
    change(entry, LEASED)
  else
    change(entry, WAITING, at_head)
  end
  save(entry)
  return answer(entry)
end

local function limited_user(key, tenant, limit)
  local user = user_of(key, tenant)
  if user.limit ~= limit then
    user.limit = limit
    place_in_rings(user)
  end
  return user
end

local function admit(_, id, tenant, user_key, limit, pool, crc, at_head, capped, waiting_max)
  grant_what_was_freed()
  node_of(ME)
  local known = entry_of(id)
  if known and known.node == ME then
    return answer(known)
  elseif known then
    forget(known)
  end
  local user = limited_user(user_key, tenant, limit)
  local who = not may_lease(user, pool) and full(user, capped, waiting_max)
  return who or lease_or_wait(new_entry(ME, id, tenant, user_key, pool, crc), user, at_head)
end

local function confirm(_, id)
  local entry = own(ME, id)
  if entry and entry.state == GRANTED then
    change(entry, LEASED)
    save(entry)
  end
  return entry ~= nil and entry.state == LEASED
end

local function move(_, id, pool)
  grant_what_was_freed()
  local entry = own(ME, id)
  if not entry then
    return 0
  elseif entry.pool == pool then
    return answer(entry)
  end
  take_out(entry)
  entry.pool = pool
  return lease_or_wait(entry, user_of(entry.user, entry.tenant), true)
end

local function release(_, id)
  local entry = own(ME, id)
  if entry then
    forget(entry)
  end
  return entry ~= nil
end

local function cancel(_, id, node)
  local entry = own(node, id)
  if entry then
    entry.cancelled = true
    save(entry)
    call('SADD', CANCELS .. node, id)
    wake(entry, 'SIGNAL:CANCEL')
  end
  return entry ~= nil
end

local function locate(_, id)
  local entry = entry_of(id)
  return entry and entry.node or ''
end

-- Announcements

-- The entry, new or not, as the request has it; nil: it is another node's.
local function announced(id, tenant, user, limit, pool, crc)
  local entry = entry_of(id)
  if entry and entry.node ~= ME then
    return nil
  end
  limited_user(user, tenant, limit)
  if entry and (entry.pool ~= pool or entry.user ~= user) then
    forget(entry)
    entry = nil
  end
  return entry or new_entry(ME, id, tenant, user, pool, crc)
end

local function announce(leases, waiting)
  local kept = {}
  for _, list in ipairs({ leases, waiting }) do
    for _, request in ipairs(list) do
      kept[request[1]] = true
    end
  end
  for _, id in ipairs(sorted_ids(ME)) do
    if not kept[id] then
      forget(entry_of(id))
      add(freed, 'unannounced', 1)
    end
  end
  for _, request in ipairs(leases) do
    local entry = announced(unpack(request))
    if entry and entry.state ~= LEASED then
      change(entry, LEASED)
      save(entry)
    end
  end
  for _, request in ipairs(waiting) do
    local entry = announced(unpack(request))
    if entry and entry.state == LEASED then
      begin_grant(entry)
      save(entry)
    elseif entry and entry.state == GONE then
      change(entry, WAITING, request[7])
      save(entry)
    end
  end
end

-- What a node is answered

local function read_elsewhere()
  local read, at = {}, call('HGETALL', READERS .. ME)
  for n = 1, #at, 2 do
    if now - tonumber(at[n + 1]) <= READ then
      read[#read + 1] = at[n]
    else
      call('HDEL', READERS .. ME, at[n])
    end
  end
  return read
end

local function positions(ids)
  local answers = {}
  for _, id in ipairs(ids) do
    local entry = own(ME, id)
    if entry and entry.state == WAITING then
      local rank = call('ZRANK', LIST .. entry.pool .. ':' .. entry.user, id) + 1
      answers[#answers + 1] = { id, position_at(entry, rank) }
    end
  end
  return answers
end

local function grants_per_second()
  local bucket, grants = floor(now / RATE_BUCKET), 0
  for old, count_then in pairs(state.rate) do
    if old <= bucket - RATE_BUCKETS then
      state.rate[old] = nil
    else
      grants = grants + count_then
    end
  end
  local span = (RATE_BUCKETS - 1) * RATE_BUCKET + now % RATE_BUCKET
  return grants >= RATE_GRANTS_MIN and grants * 1000 / span or 0
end

local function pairs_of(counts)
  local list = {}
  for name, value in pairs(counts) do
    list[#list + 1] = { name, value }
  end
  return list
end

local function view(same, asked)
  return {
    state.id, same, call('ZRANGE', GRANTS .. ME, 0, -1), node_names(), read_elsewhere(), call('SMEMBERS', CANCELS .. ME),
    pairs_of(state.active), pairs_of(state.waiting), positions(asked), grants_per_second(),
  }
end

-- The call

local operations = { admit, confirm, move, release, cancel, locate }
local result

open_state()
if ARGV[3] == 'call' then
  sweep()
  result = {}
  for n, operation in ipairs(body) do
    result[n] = operations[operation[1]](unpack(operation))
  end
  grant()
elseif ARGV[3] == 'beat' then
  local me = refresh()
  sweep()
  for id, producer in pairs(body[5]) do
    if state.nodes[producer] then
      call('HSET', READERS .. producer, id, now)
    end
  end
  local same = body[1] == me.leases and body[2] == me.leases_sum and body[3] == me.waiting and body[4] == me.waiting_sum
  grant()
  result = view(same, body[6])
elseif ARGV[3] == 'announce' then
  refresh()
  sweep()
  announce(body[1], body[2])
  grant()
  result = view(true, {})
else
  sweep()
  if state.nodes[ME] then
    for _, id in ipairs(sorted_ids(ME)) do
      forget(entry_of(id))
    end
    forget_node(ME)
  end
  grant()
  result = true
end
close_state()
return pack({ pairs_of(freed), result })
