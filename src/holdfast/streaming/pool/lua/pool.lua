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
--   pool:state            msgpack: times, counts, and the ring of pools
--   pool:nodes            hash: node -> msgpack of its heartbeat and counts
--   pool:entries          hash: id -> msgpack of the entry
--   pool:users            hash: user -> msgpack: active, limit, waiting, and its lists: [[pool, length, in ring], ...]
--   pool:waiting          hash: tenant -> how many wait
--   pool:tenants:<pool>   sorted set: the ring of tenants           pool:ids:<node>      set: all its ids
--   pool:ring:<pool>:<tenant>  sorted set: the ring of its users    pool:granted:<node>  sorted set: the oldest first
--   pool:list:<pool>:<user>    sorted set: its ids by place         pool:aside:<node>    sorted set: by missed turn
--   readers:<node>  hash: id -> when it was last read elsewhere     cancels:<node>  set: ids to cancel
--
-- Everything is in one table: the functions are made with each call, and one that captures two locals is made ten times
-- faster than one that captures eight of fifty (27 of 74 us of an empty call were theirs). Numbers that do not change are
-- strings: Redis prints any other as a float, 0.2 us each.

local call, pack, unpack_message = redis.call, cmsgpack.pack, cmsgpack.unpack
local prefix = ARGV[1]
local settings = unpack_message(ARGV[4])

local pool = {
  me = ARGV[2], prefix = prefix,
  total = settings[1], sizes = settings[2], waiting_max = settings[3], waiting_per_tenant = settings[4],
  waiting_per_user = settings[5],
  entries = prefix .. 'pool:entries', users = prefix .. 'pool:users', nodes = prefix .. 'pool:nodes',
  tenants_waiting = prefix .. 'pool:waiting', tenants = prefix .. 'pool:tenants:', ring = prefix .. 'pool:ring:',
  list = prefix .. 'pool:list:', ids = prefix .. 'pool:ids:', granted = prefix .. 'pool:granted:',
  aside = prefix .. 'pool:aside:', readers = prefix .. 'readers:', cancels = prefix .. 'cancels:', wakes = prefix .. 'wake:',
  opened_users = {}, opened_nodes = {}, freed = {}, passed_over = 0, grants = 0, has_freed = false,
  GONE = 0, WAITING = 1, SET_ASIDE = 2, GRANTED = 3, LEASED = 4, CONFIRM = 2000, DEAD = 10000, FRESH = 2500, QUIET = 2000,
  READ = 3000, REBUILD = 3000, PASSED_OVER_MAX = 16, SWEEP_MAX = 1000, RATE_BUCKET = 5000, RATE_BUCKETS = 6,
  RATE_GRANTS_MIN = 5,
}

-- Time and state

function pool.open()
  local raw = call('GET', KEYS[1])
  local state = {}
  if raw then
    state = { unpack_message(raw) }
  end
  pool.id, pool.head, pool.tail, pool.turn = state[1], state[2] or 0, state[3] or 0, state[4] or 0
  pool.active_total, pool.waiting_total = state[5] or 0, state[6] or 0
  pool.active, pool.waiting, pool.rings, pool.rate = state[7] or {}, state[8] or {}, state[9] or {}, state[10] or {}
  pool.nobody_dead_until, pool.no_grants_until, pool.sweep_at = state[11] or 0, state[12] or 0, state[13] or 0
  local last, now = state[14] or 0, tonumber(ARGV[6])
  if not now then
    local time = call('TIME')
    now = time[1] * 1000 + math.floor(time[2] / 1000)
  end
  pool.skew = math.max(state[15] or 0, last - now)
  pool.now = now + pool.skew
  if not pool.id then
    pool.id = string.format('%.0f', pool.now)
    pool.no_grants_until = pool.now + pool.REBUILD
  elseif pool.now - last > pool.QUIET then
    pool.nobody_dead_until = pool.now + pool.DEAD
  end
end

function pool.close()
  for key, user in pairs(pool.opened_users) do
    if user.active == 0 and user.waiting == 0 then
      call('HDEL', pool.users, key)
    else
      call('HSET', pool.users, key, pack(user.active, user.limit, user.waiting, user.lists))
    end
  end
  for name, node in pairs(pool.opened_nodes) do
    call('HSET', pool.nodes, name, pack(node.beat, node.blocked, node.leases, node.leases_sum, node.waiting, node.waiting_sum,
      node.granted, node.due, node.aside))
  end
  call('SET', KEYS[1], pack(pool.id, pool.head, pool.tail, pool.turn, pool.active_total, pool.waiting_total, pool.active,
    pool.waiting, pool.rings, pool.rate, pool.nobody_dead_until, pool.no_grants_until, pool.sweep_at, pool.now, pool.skew))
end

function pool.next_turn()
  pool.turn = pool.turn + 1
  return pool.turn
end

function pool.add(counts, name, by)
  local count = (counts[name] or 0) + by
  counts[name] = count ~= 0 and count or nil
end

-- A node that is known, or nil.
function pool.node(name)
  local node = pool.opened_nodes[name]
  if node then
    return node
  end
  local raw = call('HGET', pool.nodes, name)
  if raw then
    local beat, blocked, leases, leases_sum, waiting, waiting_sum, granted, due, aside = unpack_message(raw)
    node = { beat = beat, blocked = blocked, leases = leases, leases_sum = leases_sum, waiting = waiting,
      waiting_sum = waiting_sum, granted = granted, due = due, aside = aside }
    pool.opened_nodes[name] = node
  end
  return node
end

function pool.node_or_new(name)
  local node = pool.node(name)
  if not node then
    node = { beat = pool.now, blocked = false, leases = 0, leases_sum = 0, waiting = 0, waiting_sum = 0, granted = 0, due = 0,
      aside = 0 }
    pool.opened_nodes[name] = node
    pool.sweep_at = math.min(pool.sweep_at, pool.now + pool.DEAD + 1)
  end
  return node
end

function pool.user(key, tenant)
  local user = pool.opened_users[key]
  if not user then
    local raw, active, limit, waiting, lists = call('HGET', pool.users, key), 0, 0, 0, nil
    if raw then
      active, limit, waiting, lists = unpack_message(raw)
    end
    user = { key = key, tenant = tenant, active = active, limit = limit, waiting = waiting, lists = lists or {} }
    pool.opened_users[key] = user
  end
  return user
end

function pool.entry(id)
  local raw = call('HGET', pool.entries, id)
  if not raw then
    return nil
  end
  local tenant, user, node, name, state, crc, place, till, cancelled = unpack_message(raw)
  return { id = id, tenant = tenant, user = user, node = node, pool = name, state = state, crc = crc, place = place,
    till = till, cancelled = cancelled }
end

function pool.save(entry)
  call('HSET', pool.entries, entry.id, pack(entry.tenant, entry.user, entry.node, entry.pool, entry.state, entry.crc,
    entry.place, entry.till, entry.cancelled))
end

function pool.own(node, id)
  local entry = pool.entry(id)
  return entry and entry.node == node and entry or nil
end

function pool.new_entry(id, tenant, user, name, crc)
  call('SADD', pool.ids .. pool.me, id)
  return { id = id, tenant = tenant, user = user, node = pool.me, pool = name, state = pool.GONE, crc = crc, place = 0,
    till = 0, cancelled = false }
end

-- Rings

function pool.ring_at(name)
  for at, each in ipairs(pool.rings) do
    if each == name then
      return at
    end
  end
end

-- [pool, length, in ring] of a user's list.
function pool.list_of(user, name)
  for _, list in ipairs(user.lists) do
    if list[1] == name then
      return list
    end
  end
end

function pool.count_list(user, name, by)
  local list = pool.list_of(user, name)
  if not list then
    list = { name, 0, false }
    user.lists[#user.lists + 1] = list
    table.sort(user.lists, function(a, b) return a[1] < b[1] end)
  end
  list[2] = list[2] + by
end

function pool.join_ring(name, user)
  call('ZADD', pool.ring .. name .. ':' .. user.tenant, pool.next_turn(), user.key)
  call('ZADD', pool.tenants .. name, 'NX', pool.next_turn(), user.tenant)
  if not pool.ring_at(name) then
    pool.rings[#pool.rings + 1] = name
  end
end

function pool.leave_ring(name, user)
  local ring = pool.ring .. name .. ':' .. user.tenant
  call('ZREM', ring, user.key)
  if call('EXISTS', ring) == 0 then
    call('ZREM', pool.tenants .. name, user.tenant)
    if call('EXISTS', pool.tenants .. name) == 0 then
      table.remove(pool.rings, pool.ring_at(name))
    end
  end
end

-- Each pool's ring has the user if it waits there and is below its limit.
function pool.place_in_rings(user)
  local below_limit = user.limit == 0 or user.active < user.limit
  local lists, at = user.lists, 1
  while at <= #lists do
    local list = lists[at]
    local belongs = below_limit and list[2] > 0
    if belongs and not list[3] then
      pool.join_ring(list[1], user)
    elseif list[3] and not belongs then
      pool.leave_ring(list[1], user)
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
function pool.count(entry, user, node, by)
  local state = entry.state
  if state == pool.GONE then
    return
  elseif state >= pool.GRANTED then
    pool.active_total = pool.active_total + by
    user.active = user.active + by
    pool.add(pool.active, entry.pool, by)
  else
    pool.waiting_total = pool.waiting_total + by
    user.waiting = user.waiting + by
    pool.add(pool.waiting, entry.pool, by)
    if call('HINCRBY', pool.tenants_waiting, user.tenant, by > 0 and '1' or '-1') == 0 then
      call('HDEL', pool.tenants_waiting, user.tenant)
    end
  end
  if state == pool.LEASED then
    node.leases = node.leases + by
    node.leases_sum = node.leases_sum + by * entry.crc
  else
    node.waiting = node.waiting + by
    node.waiting_sum = node.waiting_sum + by * entry.crc
  end
end

function pool.leave(entry, user, node)
  pool.count(entry, user, node, -1)
  if entry.state == pool.WAITING then
    call('ZREM', pool.list .. entry.pool .. ':' .. entry.user, entry.id)
    pool.count_list(user, entry.pool, -1)
  elseif entry.state == pool.GRANTED then
    call('ZREM', pool.granted .. entry.node, entry.id)
    node.granted = node.granted - 1
  elseif entry.state == pool.SET_ASIDE then
    call('ZREM', pool.aside .. entry.node, entry.id)
    node.aside = node.aside - 1
  end
end

function pool.join_list(entry, user, at_head)
  if at_head then
    pool.head = pool.head - 1
    entry.place = pool.head
  else
    pool.tail = pool.tail + 1
    entry.place = pool.tail
  end
  call('ZADD', pool.list .. entry.pool .. ':' .. entry.user, entry.place, entry.id)
  pool.count_list(user, entry.pool, 1)
end

-- To another state, with all that both states count. The caller saves the entry.
function pool.change(entry, to, at_head)
  local user, node = pool.user(entry.user, entry.tenant), pool.node(entry.node)
  pool.leave(entry, user, node)
  entry.state = to
  if to == pool.WAITING then
    pool.join_list(entry, user, at_head)
  elseif to == pool.GRANTED then
    entry.till = pool.now + pool.CONFIRM
    if node.granted == 0 then
      node.due = entry.till
      pool.sweep_at = math.min(pool.sweep_at, entry.till)
    end
    node.granted = node.granted + 1
    call('ZADD', pool.granted .. entry.node, pool.next_turn(), entry.id)
  elseif to == pool.SET_ASIDE then
    node.aside = node.aside + 1
    call('ZADD', pool.aside .. entry.node, pool.next_turn(), entry.id)
  end
  pool.count(entry, user, node, 1)
  pool.place_in_rings(user)
end

function pool.delay_user(entry)
  call('ZADD', pool.ring .. entry.pool .. ':' .. entry.tenant, 'XX', pool.next_turn(), entry.user)
end

function pool.end_turn(entry)
  local at = pool.ring_at(entry.pool)
  if at then
    table.remove(pool.rings, at)
    pool.rings[#pool.rings + 1] = entry.pool
    call('ZADD', pool.tenants .. entry.pool, 'XX', pool.next_turn(), entry.tenant)
    pool.delay_user(entry)
  end
end

function pool.take_out(entry)
  pool.has_freed = pool.has_freed or entry.state >= pool.GRANTED
  pool.change(entry, pool.GONE)
end

function pool.forget(entry)
  pool.take_out(entry)
  call('HDEL', pool.entries, entry.id)
  call('SREM', pool.ids .. entry.node, entry.id)
  if entry.cancelled then
    call('SREM', pool.cancels .. entry.node, entry.id)
  end
end

function pool.forget_node(name)
  pool.opened_nodes[name] = nil
  call('HDEL', pool.nodes, name)
  call('DEL', pool.readers .. name)
end

-- The grant loop

function pool.wake(entry, word)
  call('PUBLISH', pool.wakes .. entry.node, 'queue:results:' .. entry.id .. ' ' .. word)
end

function pool.has_room(name)
  return pool.active_total < pool.total and (pool.active[name] or 0) < (pool.sizes[name] or pool.total)
end

function pool.next_entry()
  for _, name in ipairs(pool.rings) do
    if pool.has_room(name) then
      local tenant = call('ZRANGE', pool.tenants .. name, '0', '0')[1]
      local user = call('ZRANGE', pool.ring .. name .. ':' .. tenant, '0', '0')[1]
      return pool.entry(call('ZRANGE', pool.list .. name .. ':' .. user, '0', '0')[1])
    end
  end
end

function pool.begin_grant(entry)
  pool.change(entry, pool.GRANTED)
  pool.wake(entry, 'SIGNAL:DONE')
end

function pool.grant()
  pool.has_freed = false
  if pool.now < pool.no_grants_until then
    return
  end
  while pool.passed_over < pool.PASSED_OVER_MAX and pool.grants < pool.SWEEP_MAX do
    local entry = pool.next_entry()
    if not entry then
      return
    end
    local node = pool.node(entry.node)
    if not node.blocked and pool.now - node.beat <= pool.FRESH then
      pool.grants = pool.grants + 1
      pool.begin_grant(entry)
      pool.end_turn(entry)
      pool.add(pool.rate, math.floor(pool.now / pool.RATE_BUCKET), 1)
    else
      pool.passed_over = pool.passed_over + 1
      pool.change(entry, pool.SET_ASIDE)
    end
    pool.save(entry)
  end
end

function pool.grant_what_was_freed()
  if pool.has_freed then
    pool.grant()
  end
end

-- Late grants and dead nodes

function pool.node_names()
  local names = call('HKEYS', pool.nodes)
  for name in pairs(pool.opened_nodes) do
    if call('HEXISTS', pool.nodes, name) == 0 then
      names[#names + 1] = name
    end
  end
  table.sort(names)
  return names
end

function pool.sorted_ids(node)
  local ids = call('SMEMBERS', pool.ids .. node)
  table.sort(ids)
  return ids
end

function pool.take_back(entry)
  pool.change(entry, pool.WAITING, true)
  pool.delay_user(entry)
  pool.save(entry)
  pool.has_freed = true
  pool.add(pool.freed, 'unconfirmed', 1)
end

-- Takes back the late grants of a node; how many it may have taken, and when the next is late.
function pool.sweep_grants(name, most)
  local node, swept = pool.node(name), 0
  while node.granted > 0 and node.due <= pool.now and swept < most do
    local entry = pool.entry(call('ZRANGE', pool.granted .. name, '0', '0')[1])
    if entry.till > pool.now then
      node.due = entry.till
    else
      node.blocked = true
      pool.take_back(entry)
      swept = swept + 1
    end
  end
  return swept
end

-- The node whose heartbeat is the oldest.
function pool.oldest(names)
  local oldest
  for _, name in ipairs(names) do
    local node = pool.node(name)
    if node and (not oldest or node.beat < pool.node(oldest).beat) then
      oldest = name
    end
  end
  return oldest
end

-- Frees ids of a dead node, and the node once it has none; how many.
function pool.sweep_dead(name, most)
  local ids = pool.sorted_ids(name)
  for at = 1, math.min(#ids, most) do
    pool.forget(pool.entry(ids[at]))
    pool.add(pool.freed, 'node_dead', 1)
  end
  if #ids <= most then
    pool.forget_node(name)
  end
  return math.min(#ids, most)
end

-- When the next grant is late or the next node dead: nothing is to be done before.
function pool.next_sweep(names)
  local at = pool.now + pool.DEAD
  for _, name in ipairs(names) do
    local node = pool.node(name)
    if node then
      at = math.min(at, math.max(node.beat + pool.DEAD + 1, pool.nobody_dead_until), node.granted > 0 and node.due or at)
    end
  end
  return at
end

function pool.sweep()
  if pool.now < pool.sweep_at then
    return
  end
  local names, swept = pool.node_names(), 0
  for _, name in ipairs(names) do
    swept = swept + pool.sweep_grants(name, pool.SWEEP_MAX - swept)
  end
  local oldest = pool.oldest(names)
  while swept < pool.SWEEP_MAX and pool.now >= pool.nobody_dead_until and oldest
    and pool.now - pool.node(oldest).beat > pool.DEAD do
    swept = swept + pool.sweep_dead(oldest, pool.SWEEP_MAX - swept)
    oldest = pool.oldest(names)
  end
  pool.sweep_at = pool.next_sweep(names)
end

-- Operations

-- At most how many grants its pool gives up to its own: see fair_rings.
function pool.position_at(entry, rank)
  local tenants = call('ZCARD', pool.tenants .. entry.pool)
  local users = call('ZCARD', pool.ring .. entry.pool .. ':' .. entry.tenant)
  return math.max(1, math.min(math.max(1, tenants) * math.max(1, users) * rank, pool.waiting[entry.pool] or 0))
end

-- To an id that was here already.
function pool.answer(entry)
  if entry.state == pool.LEASED then
    return -1
  end
  local rank = entry.state == pool.WAITING and call('ZRANK', pool.list .. entry.pool .. ':' .. entry.user, entry.id) or 0
  return pool.position_at(entry, rank + 1)
end

function pool.may_lease(user, name)
  return pool.now >= pool.no_grants_until and (user.limit == 0 or user.active < user.limit) and pool.has_room(name)
    and not pool.ring_at(name)
end

function pool.full(user, capped, waiting_max)
  if not capped then
    return nil
  elseif user.waiting >= (waiting_max > 0 and waiting_max or pool.waiting_per_user) then
    return 'user'
  elseif tonumber(call('HGET', pool.tenants_waiting, user.tenant) or 0) >= pool.waiting_per_tenant then
    return 'tenant'
  elseif pool.waiting_total >= pool.waiting_max then
    return 'queue'
  end
end

function pool.lease_or_wait(entry, user, at_head)
  local leased = pool.may_lease(user, entry.pool)
  pool.change(entry, leased and pool.LEASED or pool.WAITING, at_head)
  pool.save(entry)
  return leased and -1 or pool.position_at(entry, at_head and 1 or pool.list_of(user, entry.pool)[2])
end

function pool.limited_user(key, tenant, limit)
  local user = pool.user(key, tenant)
  if user.limit ~= limit then
    user.limit = limit
    pool.place_in_rings(user)
  end
  return user
end

function pool.admit(_, id, tenant, user_key, limit, name, crc, at_head, capped, waiting_max)
  pool.grant_what_was_freed()
  pool.node_or_new(pool.me)
  local known = pool.entry(id)
  if known and known.node == pool.me then
    return pool.answer(known)
  elseif known then
    pool.forget(known)
  end
  local user = pool.limited_user(user_key, tenant, limit)
  local who = not pool.may_lease(user, name) and pool.full(user, capped, waiting_max)
  return who or pool.lease_or_wait(pool.new_entry(id, tenant, user_key, name, crc), user, at_head)
end

function pool.confirm(_, id)
  local entry = pool.own(pool.me, id)
  if entry and entry.state == pool.GRANTED then
    pool.change(entry, pool.LEASED)
    pool.save(entry)
  end
  return entry ~= nil and entry.state == pool.LEASED
end

function pool.move(_, id, name)
  pool.grant_what_was_freed()
  local entry = pool.own(pool.me, id)
  if not entry then
    return 0
  elseif entry.pool == name then
    return pool.answer(entry)
  end
  pool.take_out(entry)
  entry.pool = name
  return pool.lease_or_wait(entry, pool.user(entry.user, entry.tenant), true)
end

function pool.release(_, id)
  local entry = pool.own(pool.me, id)
  if entry then
    pool.forget(entry)
  end
  return entry ~= nil
end

function pool.cancel(_, id, node)
  local entry = pool.own(node, id)
  if entry then
    entry.cancelled = true
    pool.save(entry)
    call('SADD', pool.cancels .. node, id)
    pool.wake(entry, 'SIGNAL:CANCEL')
  end
  return entry ~= nil
end

function pool.locate(_, id)
  local entry = pool.entry(id)
  return entry and entry.node or ''
end

-- Heartbeats and announcements

-- The node gets grants, and what was set aside for it returns to its old place in its list. It is not dead, but its late
-- grants are taken back first.
function pool.on_heartbeat()
  local node, returning = pool.node_or_new(pool.me), {}
  node.beat = pool.now
  pool.sweep()
  node.blocked = false
  if node.aside == 0 then
    return node
  end
  for n, id in ipairs(call('ZRANGE', pool.aside .. pool.me, 0, -1)) do
    local entry = pool.entry(id)
    local user = pool.user(entry.user, entry.tenant)
    entry.state = pool.WAITING
    call('ZADD', pool.list .. entry.pool .. ':' .. entry.user, entry.place, id)
    pool.count_list(user, entry.pool, 1)
    pool.save(entry)
    returning[n] = user
  end
  call('DEL', pool.aside .. pool.me)
  node.aside = 0
  for _, user in ipairs(returning) do
    pool.place_in_rings(user)
  end
  return node
end

-- The entry, new or not, as the request has it; nil: it is another node's.
function pool.announced(id, tenant, user, limit, name, crc)
  local entry = pool.entry(id)
  if entry and entry.node ~= pool.me then
    return nil
  end
  pool.limited_user(user, tenant, limit)
  if entry and (entry.pool ~= name or entry.user ~= user) then
    pool.forget(entry)
    entry = nil
  end
  return entry or pool.new_entry(id, tenant, user, name, crc)
end

function pool.announce(leases, waiting)
  local kept = {}
  for _, list in ipairs({ leases, waiting }) do
    for _, request in ipairs(list) do
      kept[request[1]] = true
    end
  end
  for _, id in ipairs(pool.sorted_ids(pool.me)) do
    if not kept[id] then
      pool.forget(pool.entry(id))
      pool.add(pool.freed, 'unannounced', 1)
    end
  end
  for _, request in ipairs(leases) do
    local entry = pool.announced(unpack(request))
    if entry and entry.state ~= pool.LEASED then
      pool.change(entry, pool.LEASED)
      pool.save(entry)
    end
  end
  for _, request in ipairs(waiting) do
    local entry = pool.announced(unpack(request))
    if entry and entry.state == pool.LEASED then
      pool.begin_grant(entry)
      pool.save(entry)
    elseif entry and entry.state == pool.GONE then
      pool.change(entry, pool.WAITING, request[7])
      pool.save(entry)
    end
  end
end

-- What a node is answered

function pool.read_elsewhere()
  local read, at = {}, call('HGETALL', pool.readers .. pool.me)
  for n = 1, #at, 2 do
    if pool.now - tonumber(at[n + 1]) <= pool.READ then
      read[#read + 1] = at[n]
    else
      call('HDEL', pool.readers .. pool.me, at[n])
    end
  end
  return read
end

function pool.positions(ids)
  local answers = {}
  for _, id in ipairs(ids) do
    local entry = pool.own(pool.me, id)
    if entry and entry.state == pool.WAITING then
      local rank = call('ZRANK', pool.list .. entry.pool .. ':' .. entry.user, id) + 1
      answers[#answers + 1] = { id, pool.position_at(entry, rank) }
    end
  end
  return answers
end

function pool.grants_per_second()
  local bucket, grants = math.floor(pool.now / pool.RATE_BUCKET), 0
  for each, count in pairs(pool.rate) do
    if each <= bucket - pool.RATE_BUCKETS then
      pool.rate[each] = nil
    else
      grants = grants + count
    end
  end
  local span = (pool.RATE_BUCKETS - 1) * pool.RATE_BUCKET + pool.now % pool.RATE_BUCKET
  return grants >= pool.RATE_GRANTS_MIN and grants * 1000 / span or 0
end

function pool.pairs_of(counts)
  local list = {}
  for name, value in pairs(counts) do
    list[#list + 1] = { name, value }
  end
  return list
end

function pool.view(same, asked)
  return {
    pool.id, same, call('ZRANGE', pool.granted .. pool.me, 0, -1), pool.node_names(), pool.read_elsewhere(),
    call('SMEMBERS', pool.cancels .. pool.me), pool.pairs_of(pool.active), pool.pairs_of(pool.waiting),
    pool.positions(asked), pool.grants_per_second(),
  }
end

-- The four calls

function pool.on_call(body)
  local operations = { pool.admit, pool.confirm, pool.move, pool.release, pool.cancel, pool.locate }
  local answers = {}
  pool.sweep()
  for n, operation in ipairs(body) do
    answers[n] = operations[operation[1]](unpack(operation))
  end
  pool.grant()
  return answers
end

function pool.on_beat(body)
  local leases, leases_sum, waiting, waiting_sum, reading, asked = unpack(body)
  local me = pool.on_heartbeat()
  for id, producer in pairs(reading) do
    if pool.node(producer) then
      call('HSET', pool.readers .. producer, id, pool.now)
    end
  end
  local same = leases == me.leases and leases_sum == me.leases_sum and waiting == me.waiting
    and waiting_sum == me.waiting_sum
  pool.grant()
  return pool.view(same, asked)
end

function pool.on_announce(body)
  pool.on_heartbeat()
  pool.announce(body[1], body[2])
  pool.grant()
  return pool.view(true, {})
end

function pool.on_leave()
  pool.sweep()
  if pool.node(pool.me) then
    for _, id in ipairs(pool.sorted_ids(pool.me)) do
      pool.forget(pool.entry(id))
    end
    pool.forget_node(pool.me)
  end
  pool.grant()
  return true
end

pool.open()
local answer = pool['on_' .. ARGV[3]](unpack_message(ARGV[5]))
pool.close()
return pack({ pool.pairs_of(pool.freed), answer })
