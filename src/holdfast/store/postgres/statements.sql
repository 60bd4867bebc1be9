-- Every statement that the PostgreSQL store sends; what writes is in functions/ and commits by itself.
--
-- OFFSET 0 in a LATERAL: look up each row by its whole key. Plans are made once, perhaps while a table is small, when
-- comparing with all rows of a chat would seem as cheap.

-- name: schema_version
SELECT CASE WHEN to_regclass('holdfast_chats.schema_version') IS NULL THEN 0 ELSE 1 END

-- name: present_version
SELECT coalesce(max(version), 0) FROM holdfast_chats.schema_version

-- name: oldest_connection
-- The lowest schema version among the connections of nodes; null if none says its own.
SELECT min(substring(application_name FROM '^holdfast chats ([0-9]+)$')::integer)
  FROM pg_stat_activity WHERE datname = current_database()

-- name: server
-- What a connection reaches, and whether its settings are what was asked for.
SELECT pg_is_in_recovery() AS in_recovery,
       (SELECT system_identifier::text FROM pg_control_system()) AS system,
       CASE WHEN pg_is_in_recovery() THEN 0
            ELSE ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::bigint END AS timeline,
       current_setting('fsync') AS fsync, current_setting('full_page_writes') AS full_page_writes,
       current_setting('synchronous_commit') AS synchronous_commit,
       current_setting('transaction_isolation') AS transaction_isolation,
       (extract(epoch FROM current_setting('lock_timeout')::interval) * 1000)::integer AS lock_timeout,
       (extract(epoch FROM current_setting('statement_timeout')::interval) * 1000)::integer AS statement_timeout,
       current_setting('plan_cache_mode') AS plan_cache_mode,
       current_setting('synchronous_standby_names') AS standbys

-- name: cluster
SELECT system, timeline, epoch_base, shards FROM holdfast_chats.cluster

-- name: append
CALL holdfast_chats.append_and_commit_1($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, NULL, NULL, NULL, NULL)

-- name: change
CALL holdfast_chats.change_1($1, $2, $3, NULL, NULL, NULL, NULL)

-- name: adopt
CALL holdfast_chats.adopt_1($1, $2, $3, $4, $5, $6, $7, NULL, NULL)

-- name: record
CALL holdfast_chats.record_and_commit_1($1)

-- name: begin
CALL holdfast_chats.begin_1($1, $2, $3, $4, $5, $6, $7, NULL, NULL, NULL, NULL)

-- name: keep
CALL holdfast_chats.keep_1($1, $2, $3, $4)

-- name: forget_answers
CALL holdfast_chats.forget_answers_1($1, $2, NULL)

-- name: forget_answers_of
CALL holdfast_chats.forget_answers_of_1($1, $2)

-- name: forget_send_keys
CALL holdfast_chats.forget_send_keys_1($1, $2, NULL)

-- name: forget_log_events
CALL holdfast_chats.forget_log_events_1($1, $2, $3, NULL)

-- name: forget_devices
CALL holdfast_chats.forget_devices_1($1, $2)

-- name: mark
CALL holdfast_chats.mark_1($1, $2, $3, $4, $5, $6, $7, $8)

-- name: touch
CALL holdfast_chats.touch_1()

-- name: inputs
-- What the decision about a command reads, in one snapshot. $1 chat_id, $2 tenant, $3 actor, $4 target or null,
-- $5 users who would join, $6 pair or null, $7 idempotency key or null, $8 sequence of a message or null,
-- $9 whether the numbering is wanted.
SELECT b.epoch_base AS base, a.fingerprint, a.answer, c.version, c.counter, c.members,
       (SELECT v.value::text FROM holdfast_chats.chat_value AS v WHERE v.chat = c.chat) AS chat,
       (SELECT v.value::text FROM holdfast_chats.chat AS p JOIN holdfast_chats.chat_value AS v ON v.chat = p.chat
         WHERE p.tenant = $2 AND p.pair = $6) AS pair,
       (SELECT m.value::text FROM holdfast_chats.member_value AS m WHERE m.chat = c.chat AND m.user_id = $3) AS actor,
       (SELECT m.value::text FROM holdfast_chats.member_value AS m WHERE m.chat = c.chat AND m.user_id = $4) AS target,
       (SELECT count(*) FROM holdfast_chats.member AS m WHERE m.chat = c.chat AND m.role = 'owner') AS owners,
       (SELECT e.by_operator FROM holdfast_chats.ban AS e WHERE e.chat = c.chat AND e.user_id = $4) AS banned_by_operator,
       (SELECT count(*) FROM holdfast_chats.ban AS e WHERE e.chat = c.chat) AS bans,
       (SELECT q.by_operator FROM holdfast_chats.mute AS q WHERE q.chat = c.chat AND q.user_id = $4) AS muted_by_operator,
       (SELECT count(*) FROM holdfast_chats.mute AS q WHERE q.chat = c.chat) AS mutes,
       (SELECT json_object_agg(u, (SELECT json_build_array(count(*), count(*) FILTER (WHERE m.invited))
                                     FROM holdfast_chats.member AS m WHERE m.tenant = $2 AND m.user_id = u))::text
          FROM unnest($5::text[]) AS u) AS counts,
       (SELECT v.value::text FROM holdfast_chats.message_value AS v WHERE v.chat = c.chat AND v.sequence = $8) AS message,
       n.highest, n.gaps
  FROM holdfast_chats.cluster AS b
  LEFT JOIN holdfast_chats.answer AS a ON a.tenant = $2 AND a.user_id = $3 AND a.key = $7
  LEFT JOIN holdfast_chats.chat AS c ON c.chat_id = $1
  LEFT JOIN LATERAL (
    SELECT max(g.highest) AS highest, json_agg(json_build_array(g.first, g.last) ORDER BY g.first)
             FILTER (WHERE g.first IS NOT NULL)::text AS gaps
      FROM holdfast_chats.numbering AS g WHERE g.chat = c.chat) AS n ON $9

-- name: readable
-- A chat for somebody who wants to read it, and whether the user is a member. $1 chat_id, $2 user_id or null
SELECT v.value::text AS chat, v.chat AS number,
       EXISTS (SELECT FROM holdfast_chats.member AS m WHERE m.chat = v.chat AND m.user_id = $2) AS is_member
  FROM holdfast_chats.chat_value AS v WHERE v.chat_id = $1

-- name: page_after
-- As readable, with up to $4 messages past $3, as long as they weigh no more than $5 bytes; the first one always. A
-- message weighs its content, unescaped, and 128 bytes: less than it takes when it is sent, and found without reading
-- it. has_more: whether one follows these.
SELECT v.value::text AS chat,
       EXISTS (SELECT FROM holdfast_chats.member AS m WHERE m.chat = v.chat AND m.user_id = $2) AS is_member,
       p.messages, p.has_more
  FROM holdfast_chats.chat_value AS v
 CROSS JOIN LATERAL (
    SELECT json_agg(f.value ORDER BY w.sequence)::text AS messages,
           EXISTS (SELECT FROM holdfast_chats.message AS o
                    WHERE o.chat = v.chat AND o.sequence > coalesce(max(w.sequence), $3)) AS has_more
      FROM (SELECT n.sequence, row_number() OVER upward AS n, sum(n.bytes) OVER upward AS bytes
              FROM (SELECT m.sequence, octet_length(m.content) + 128 AS bytes FROM holdfast_chats.message AS m
                     WHERE m.chat = v.chat AND m.sequence > $3 ORDER BY m.sequence LIMIT $4) AS n
            WINDOW upward AS (ORDER BY n.sequence ROWS UNBOUNDED PRECEDING)) AS w
     CROSS JOIN LATERAL (SELECT o.value FROM holdfast_chats.message_value AS o
                          WHERE o.chat = v.chat AND o.sequence = w.sequence OFFSET 0) AS f
     WHERE w.n = 1 OR w.bytes <= $5) AS p
 WHERE v.chat_id = $1

-- name: page_before
-- As page_after, downwards from $3; the answer ascends all the same.
SELECT v.value::text AS chat,
       EXISTS (SELECT FROM holdfast_chats.member AS m WHERE m.chat = v.chat AND m.user_id = $2) AS is_member,
       p.messages, p.has_more
  FROM holdfast_chats.chat_value AS v
 CROSS JOIN LATERAL (
    SELECT json_agg(f.value ORDER BY w.sequence)::text AS messages,
           EXISTS (SELECT FROM holdfast_chats.message AS o
                    WHERE o.chat = v.chat AND o.sequence < coalesce(min(w.sequence), $3)) AS has_more
      FROM (SELECT n.sequence, row_number() OVER downward AS n, sum(n.bytes) OVER downward AS bytes
              FROM (SELECT m.sequence, octet_length(m.content) + 128 AS bytes FROM holdfast_chats.message AS m
                     WHERE m.chat = v.chat AND m.sequence < $3 ORDER BY m.sequence DESC LIMIT $4) AS n
            WINDOW downward AS (ORDER BY n.sequence DESC ROWS UNBOUNDED PRECEDING)) AS w
     CROSS JOIN LATERAL (SELECT o.value FROM holdfast_chats.message_value AS o
                          WHERE o.chat = v.chat AND o.sequence = w.sequence OFFSET 0) AS f
     WHERE w.n = 1 OR w.bytes <= $5) AS p
 WHERE v.chat_id = $1

-- name: heads
-- $1 chat_ids
SELECT v.chat_id, v.epoch, v.head
  FROM unnest($1::text[]) AS g(chat_id) JOIN holdfast_chats.chat_value AS v ON v.chat_id = g.chat_id

-- name: memberships
-- For each user, in order, their chats: as long as these are $3 together, and of the first. $1 tenants, $2 user_ids
SELECT g.place, v.chat_id, v.epoch, v.head
  FROM (SELECT u.n AS place, u.tenant, u.user_id,
               sum((SELECT count(*) FROM holdfast_chats.member AS m
                     WHERE m.tenant = u.tenant AND m.user_id = u.user_id)) OVER (ORDER BY u.n) AS chats_so_far
          FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS u(tenant, user_id, n)) AS g
  LEFT JOIN holdfast_chats.member AS m ON m.tenant = g.tenant AND m.user_id = g.user_id
  LEFT JOIN holdfast_chats.chat_value AS v ON v.chat = m.chat
 WHERE g.chats_so_far <= $3 OR g.place = 1

-- name: memberships_in
-- Those of the asked ones that are memberships: their place, and the chat's epoch and head. $1 tenants, $2 user_ids,
-- $3 chat_ids
SELECT g.n AS place, v.epoch, v.head
  FROM unnest($1::text[], $2::text[], $3::text[]) WITH ORDINALITY AS g(tenant, user_id, chat_id, n)
  JOIN holdfast_chats.chat_value AS v ON v.chat_id = g.chat_id AND v.tenant = g.tenant
 WHERE EXISTS (SELECT FROM holdfast_chats.member AS m WHERE m.chat = v.chat AND m.user_id = g.user_id OFFSET 0)

-- name: list_edge
-- Where a page of a list of chats ended: at a chat whose head was $2 then. $1 its number
SELECT coalesce((SELECT m.created_at FROM holdfast_chats.message AS m WHERE m.chat = c.chat AND m.sequence = $2),
                c.active_at)
  FROM holdfast_chats.chat AS c WHERE c.chat = $1

-- name: chats_of
-- A page of a user's chats, newest activity first. $1 tenant, $2 user_id, $3 limit, $4 and $5 activity and number where
-- the page before ended, or null, $6 only these chat_ids, or null for all, $7 how many newest messages are looked at.
WITH page AS MATERIALIZED (
    SELECT c.chat, c.active_at, c.epoch, c.kind, c.name, c.members
      FROM holdfast_chats.member AS m JOIN holdfast_chats.chat AS c ON c.chat = m.chat
     WHERE m.tenant = $1 AND m.user_id = $2
       AND ($4::timestamptz IS NULL OR (c.active_at, c.chat) < ($4::timestamptz, $5::bigint))
       AND ($6::text[] IS NULL OR c.chat_id = ANY ($6::text[]))
     ORDER BY c.active_at DESC, c.chat DESC LIMIT $3
), seen AS MATERIALIZED (
    SELECT p.*, coalesce((SELECT max(w.read) FROM holdfast_chats.watermark AS w
                           WHERE w.chat = p.chat AND w.user_id = $2 AND w.epoch = p.epoch), 0) AS read
      FROM page AS p
)
SELECT v.value::text AS chat, (SELECT m.role FROM holdfast_chats.member AS m WHERE m.chat = p.chat AND m.user_id = $2) AS role,
       CASE p.kind WHEN 'direct' THEN (
         SELECT coalesce(string_agg(o.user_id, ', ' ORDER BY o.user_id), '') FROM holdfast_chats.member AS o
          WHERE o.chat = p.chat AND o.user_id <> $2) ELSE p.name END AS title,
       p.members, p.read,
       (SELECT count(*) FROM holdfast_chats.message AS u
         WHERE u.chat = p.chat AND u.sequence > greatest(p.read, v.head - $7::bigint)
           AND u.kind = 'text' AND u.sender_id <> $2 AND octet_length(u.content) > 0) AS unread,
       (SELECT l.value::text FROM holdfast_chats.message_value AS l WHERE l.chat = p.chat AND l.sequence = v.head) AS last
  FROM seen AS p JOIN holdfast_chats.chat_value AS v ON v.chat = p.chat
 ORDER BY p.active_at DESC, p.chat DESC

-- name: members_of
SELECT json_agg(m.value ORDER BY m.user_id)::text
  FROM holdfast_chats.chat AS c JOIN holdfast_chats.member_value AS m ON m.chat = c.chat WHERE c.chat_id = $1

-- name: bans_of
SELECT json_agg(json_build_object('user_id', b.user_id, 'banned_by', b.banned_by, 'banned_at', b.banned_at,
                                  'by_operator', b.by_operator) ORDER BY b.user_id)::text
  FROM holdfast_chats.chat AS c JOIN holdfast_chats.ban AS b ON b.chat = c.chat WHERE c.chat_id = $1

-- name: mutes_of
SELECT json_agg(json_build_object('user_id', q.user_id, 'by_operator', q.by_operator) ORDER BY q.user_id)::text
  FROM holdfast_chats.chat AS c JOIN holdfast_chats.mute AS q ON q.chat = c.chat WHERE c.chat_id = $1

-- name: watermarks_of
-- Those of members; one that came while its user was removed is nobody's.
SELECT c.tenant, w.user_id, w.device_id, w.epoch + b.epoch_base AS epoch, w.delivered, w.read
  FROM holdfast_chats.cluster AS b, holdfast_chats.chat AS c
  JOIN holdfast_chats.watermark AS w ON w.chat = c.chat AND w.epoch = c.epoch
  JOIN holdfast_chats.member AS m ON m.chat = c.chat AND m.user_id = w.user_id
 WHERE c.chat_id = $1 ORDER BY w.user_id, w.device_id

-- name: inspect
SELECT v.value::text AS chat, c.counter, n.highest, n.stored, n.gaps,
       (SELECT json_agg(json_build_array(g.first_sequence, g.last_sequence) ORDER BY g.first_sequence, g.last_sequence)::text
          FROM holdfast_chats.gap AS g WHERE g.chat = c.chat) AS recorded
  FROM holdfast_chats.chat AS c JOIN holdfast_chats.chat_value AS v ON v.chat = c.chat
 CROSS JOIN LATERAL (
    SELECT max(g.highest) AS highest, max(g.stored) AS stored,
           json_agg(json_build_array(g.first, g.last) ORDER BY g.first) FILTER (WHERE g.first IS NOT NULL)::text AS gaps
      FROM holdfast_chats.numbering AS g WHERE g.chat = c.chat) AS n
 WHERE c.chat_id = $1

-- name: audit_after
-- $1 number, $2 limit
SELECT number, at, actor, action, target, reason, details, record_id, node, hash
  FROM holdfast_chats.audit WHERE number > $1 ORDER BY number LIMIT $2

-- name: audit_end
SELECT coalesce(max(number), 0) FROM holdfast_chats.audit

-- name: texts_of
-- Of the $5 messages after position $4 of shard $3: where a user sent something that is still there, and the last one
-- that was looked at. Senders have no index: every send would pay for it. $1 tenant, $2 user_id
WITH looked AS MATERIALIZED (
    SELECT m.position, m.chat, m.sequence, m.sender_id, m.kind, octet_length(m.content) > 0 AS is_there
      FROM holdfast_chats.message AS m WHERE m.shard = $3 AND m.position > $4 ORDER BY m.position LIMIT $5)
SELECT (SELECT json_agg(json_build_array(c.chat_id, e.sequence) ORDER BY e.position)::text
          FROM looked AS e JOIN holdfast_chats.chat AS c ON c.chat = e.chat
         WHERE e.sender_id = $2 AND c.tenant = $1 AND e.kind = 'text' AND e.is_there) AS texts,
       (SELECT max(position) FROM looked) AS through, (SELECT count(*) FROM looked) AS looked

-- name: active_since
-- Of the $3 chats after number $2: those with a message not older than $1, and the last one that was looked at.
WITH looked AS MATERIALIZED (
    SELECT c.chat, c.tenant, c.chat_id FROM holdfast_chats.chat AS c WHERE c.chat > $2 ORDER BY c.chat LIMIT $3)
SELECT (SELECT json_agg(json_build_array(l.tenant, l.chat_id) ORDER BY l.chat)::text FROM looked AS l
         WHERE (SELECT m.created_at FROM holdfast_chats.message AS m WHERE m.chat = l.chat
                 ORDER BY m.sequence DESC LIMIT 1) >= $1::text::timestamptz) AS chats,
       (SELECT max(chat) FROM looked) AS through

-- name: damaged
-- Of the $2 chats after number $1: those whose counter is missing or behind, and the last one that was looked at.
WITH looked AS MATERIALIZED (
    SELECT c.chat, c.chat_id, c.halted, c.counter FROM holdfast_chats.chat AS c WHERE c.chat > $1 ORDER BY c.chat LIMIT $2)
SELECT (SELECT json_agg(l.chat_id ORDER BY l.chat)::text FROM looked AS l
         WHERE l.halted IS NULL AND (l.counter IS NULL OR EXISTS (
               SELECT FROM holdfast_chats.message AS m WHERE m.chat = l.chat AND m.sequence > l.counter))) AS chats,
       (SELECT max(chat) FROM looked) AS through

-- name: halt_damaged
-- Halt those of the chats $1 whose counter is missing or behind. If it waits for a send of the chat, it sees the counter
-- after that send and the messages before it, so that it never takes a sound chat for a damaged one.
WITH halted AS (
    UPDATE holdfast_chats.chat AS c
       SET version = c.version + 1, halted = CASE WHEN c.counter IS NULL THEN 'its counter is missing'
                                                  ELSE 'its counter is behind its messages' END
     WHERE c.chat_id = ANY ($1::text[]) AND c.halted IS NULL AND (c.counter IS NULL OR EXISTS (
           SELECT FROM holdfast_chats.message AS m WHERE m.chat = c.chat AND m.sequence > c.counter))
    RETURNING c.chat_id, c.counter)
SELECT coalesce(array_agg(h.chat_id) FILTER (WHERE h.counter IS NULL), '{}') AS lost,
       coalesce(array_agg(h.chat_id) FILTER (WHERE h.counter IS NOT NULL), '{}') AS taken FROM halted AS h

-- name: halted
-- How many chats are halted, and the first $1 of them.
SELECT (SELECT count(*) FROM holdfast_chats.chat WHERE halted IS NOT NULL) AS count,
       (SELECT json_agg(json_build_object('chat_id', h.chat_id, 'tenant', h.tenant, 'why', h.halted) ORDER BY h.chat_id)::text
          FROM (SELECT chat_id, tenant, halted FROM holdfast_chats.chat
                 WHERE halted IS NOT NULL ORDER BY chat_id LIMIT $1) AS h) AS chats

-- name: chats_end
SELECT coalesce(max(chat), 0) FROM holdfast_chats.chat

-- name: log_ends
-- The base of the epochs, and of each shard the first position that is kept and the last that is committed.
SELECT (SELECT epoch_base FROM holdfast_chats.cluster) AS base, array_agg(s.first_position ORDER BY s.shard) AS firsts,
       array_agg(greatest(
         (SELECT m.position FROM holdfast_chats.message AS m WHERE m.shard = s.shard ORDER BY m.position DESC LIMIT 1),
         (SELECT e.position FROM holdfast_chats.log_event AS e WHERE e.shard = s.shard ORDER BY e.position DESC LIMIT 1),
         0) ORDER BY s.shard) AS ends
  FROM holdfast_chats.shard AS s

-- name: log_after
-- Up to $2 entries past the positions $1 of all shards; each shard with any gives the same share, so that none waits
-- for the others. One statement: a second one would see commits that the first did not, and step over them.
WITH news AS MATERIALIZED (
    SELECT s.shard, s.first_position, a.after
      FROM holdfast_chats.shard AS s CROSS JOIN LATERAL (SELECT coalesce(($1::bigint[])[s.shard + 1], 0) AS after) AS a
     WHERE EXISTS (SELECT FROM holdfast_chats.message AS m WHERE m.shard = s.shard AND m.position > a.after)
        OR EXISTS (SELECT FROM holdfast_chats.log_event AS e WHERE e.shard = s.shard AND e.position > a.after)
), share AS MATERIALIZED (
    SELECT ($2::bigint + count(*) - 1) / greatest(count(*), 1) AS entries FROM news
)
SELECT s.shard, n.position, s.first_position, b.epoch_base AS base, (SELECT entries FROM share) AS share,
       coalesce(c.tenant, '') AS tenant, coalesce(c.chat_id, '') AS chat_id,
       CASE WHEN n.event IS NULL THEN c.epoch + b.epoch_base
            WHEN n.chat IS NULL THEN n.epoch ELSE n.epoch + b.epoch_base END AS epoch,
       n.event, n.users, n.numbers, n.message_id, n.sequence, n.kind, n.sender_id, n.client_message_id, n.content,
       n.content_type, holdfast_chats.text_of_time(n.created_at) AS created_at
  FROM news AS s
 CROSS JOIN LATERAL (
    (SELECT m.position, m.chat, NULL::bigint AS epoch, NULL::text AS event, NULL::text[] AS users,
            NULL::bigint[] AS numbers, m.message_id, m.sequence, m.kind, m.sender_id, m.client_message_id, m.content,
            m.content_type, m.created_at
       FROM holdfast_chats.message AS m
      WHERE m.shard = s.shard AND m.position > s.after ORDER BY m.position LIMIT (SELECT entries FROM share))
    UNION ALL
    (SELECT e.position, e.chat, e.epoch, e.kind, e.users, e.numbers, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
       FROM holdfast_chats.log_event AS e
      WHERE e.shard = s.shard AND e.position > s.after ORDER BY e.position LIMIT (SELECT entries FROM share))
    ORDER BY position LIMIT (SELECT entries FROM share)) AS n
  LEFT JOIN holdfast_chats.chat AS c ON c.chat = n.chat
 CROSS JOIN holdfast_chats.cluster AS b
 ORDER BY s.shard, n.position LIMIT $2

-- name: log_lag
-- How many entries follow the positions $1.
SELECT coalesce(sum(
         (SELECT count(*) FROM holdfast_chats.message AS m
           WHERE m.shard = s.shard AND m.position > coalesce(($1::bigint[])[s.shard + 1], 0))
       + (SELECT count(*) FROM holdfast_chats.log_event AS e
           WHERE e.shard = s.shard AND e.position > coalesce(($1::bigint[])[s.shard + 1], 0))), 0)::bigint
  FROM holdfast_chats.shard AS s

-- name: notify
SELECT pg_notify('holdfast_chats', '')

-- name: lease_acquire
-- $1 name, $2 holder, $3 seconds
CALL holdfast_chats.lease_acquire_1($1, $2, $3, NULL, NULL)

-- name: lease_renew
-- $1 name, $2 base and $3 number of the fence, $4 seconds
CALL holdfast_chats.lease_renew_1($1, $2, $3, $4, NULL)

-- name: leases
SELECT name, holder, extract(epoch FROM expires_at - clock_timestamp())::double precision
  FROM holdfast_chats.lease WHERE expires_at > clock_timestamp() ORDER BY name

-- name: take_name
-- Whether nobody else holds this lock; this connection does from now on.
SELECT pg_try_advisory_lock($1)

-- name: node
SELECT record FROM holdfast_chats.node WHERE name = $1

-- name: nodes
-- Those renewed in the last $1 seconds.
SELECT record, greatest(age, 0)::double precision AS age_seconds
  FROM holdfast_chats.node AS n
 CROSS JOIN LATERAL (SELECT extract(epoch FROM clock_timestamp() - n.renewed_at) AS age) AS a
 WHERE abs(age) < $1 ORDER BY name

-- name: nodes_gone
-- Those not renewed in the last $1 seconds, but in the last $2.
SELECT record, extract(epoch FROM renewed_at)::double precision AS since, age::double precision AS age_seconds
  FROM holdfast_chats.node AS n
 CROSS JOIN LATERAL (SELECT extract(epoch FROM clock_timestamp() - n.renewed_at) AS age) AS a
 WHERE age >= $1 AND age < $2 ORDER BY name

-- name: node_renew
-- $1 name, $2 record, $3 connections, $4 how long a node lives, $5 whether it starts
CALL holdfast_chats.node_renew_1($1, $2, $3, $4, $5, NULL, NULL)

-- name: node_leave
CALL holdfast_chats.node_leave_1($1)

-- name: database
-- $1: how many seconds a node lives.
SELECT current_setting('server_version') AS version, c.epoch_base,
       (SELECT coalesce(sum(n.connections), 0)::integer FROM holdfast_chats.node AS n
         WHERE abs(extract(epoch FROM clock_timestamp() - n.renewed_at)) < $1) AS wanted,
       holdfast_chats.node_connections_1() AS available
  FROM holdfast_chats.cluster AS c
