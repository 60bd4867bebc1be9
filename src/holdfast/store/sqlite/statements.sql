-- Every statement of the SQLite store. Each takes its batch as JSON and answers in one row of JSON: every row
-- that is stepped costs a hand-over of the interpreter lock, which a busy event loop gives back late.

-- name: known
-- What is known of a group: its senders [[chat_id, user_id], ...], the messages already stored under its keys
-- [[chat_id, send_key, sender_id, client_message_id], ...], and the end of the log.
SELECT (
  SELECT json_group_array(json_array(
           c.chat_id, s.value ->> 1, c.chat, c.tenant, c.halted, k.sequence_counter, c.epoch, m.chat IS NOT NULL,
           EXISTS (SELECT 1 FROM mutes AS q WHERE q.chat = c.chat AND q.user_id = s.value ->> 1)))
  FROM json_each(:senders) AS s
  CROSS JOIN chats AS c ON c.chat_id = s.value ->> 0
  LEFT JOIN counters AS k ON k.chat = c.chat
  LEFT JOIN members AS m ON m.chat = c.chat AND m.user_id = s.value ->> 1
), (
  SELECT json_group_array(json_array(lower(hex(m.content_hash)), json(v.value)))
  FROM json_each(:keys) AS k
  CROSS JOIN chats AS c ON c.chat_id = k.value ->> 0
  CROSS JOIN messages AS m INDEXED BY messages_by_key
    ON m.chat = c.chat AND m.send_key = k.value ->> 1
    AND m.sender_id = k.value ->> 2 AND m.client_message_id = k.value ->> 3
  JOIN message_values AS v ON v.position = m.position
), coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'messages'), 0);

-- name: put_messages
-- Put only if absent: a taken sequence, key or position violates its index and fails the statement.
INSERT INTO messages (position, chat, sequence, kind, sender_id, client_message_id, send_key, content_hash, message_id,
                      content, content_type, created_at)
SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5, value ->> 6, unhex(value ->> 7),
       value ->> 8, value ->> 9, value ->> 10, value ->> 11
FROM json_each(:messages);

-- name: advance_counters
-- [[chat, sequence_counter, last_position], ...]. A counter is only ever created with its chat, or by recovery.
UPDATE counters SET sequence_counter = n.value ->> 1, last_position = n.value ->> 2
FROM json_each(:counters) AS n WHERE counters.chat = n.value ->> 0;

-- name: halt
UPDATE chats SET halted = :why WHERE chat_id = :chat_id;

-- name: taken
-- Whether a chat's next sequence is already there: its counter is behind.
SELECT 1 FROM chats AS c JOIN counters AS k ON k.chat = c.chat
JOIN messages AS m ON m.chat = c.chat AND m.sequence = k.sequence_counter + 1
WHERE c.chat_id = :chat_id;

-- name: answer
SELECT fingerprint, answer FROM answers WHERE tenant = :tenant AND user_id = :user_id AND key = :key;

-- name: put_answer
INSERT INTO answers (tenant, user_id, key, fingerprint, answer, at)
VALUES (:tenant, :user_id, :key, :fingerprint, :answer, :at);

-- name: taken_key
SELECT fingerprint, answer, node, until FROM answers WHERE tenant = :tenant AND user_id = :user_id AND key = :key;

-- name: take_key
INSERT INTO answers (tenant, user_id, key, fingerprint, answer, at, node, until)
VALUES (:tenant, :user_id, :key, :fingerprint, '', :at, :node, :until);

-- name: keep_answer
UPDATE answers SET answer = :answer WHERE tenant = :tenant AND user_id = :user_id AND key = :key;

-- name: drop_answer
DELETE FROM answers WHERE tenant = :tenant AND user_id = :user_id AND key = :key;

-- name: forget_answers
-- At most :limit, the oldest first.
DELETE FROM answers WHERE (tenant, user_id, key) IN (
  SELECT tenant, user_id, key FROM answers WHERE at < :before ORDER BY at LIMIT :limit);

-- name: forget_answers_of
DELETE FROM answers WHERE tenant = :tenant AND user_id = :user_id;

-- name: old_keys
-- The last of the next :limit messages to lose their keys: those before the first that is not older than :before.
WITH next AS MATERIALIZED (
  SELECT position, created_at FROM messages
  WHERE position > (SELECT through FROM keys_forgotten WHERE one = 1) ORDER BY position LIMIT :limit)
SELECT max(position) FROM next
WHERE position < coalesce((SELECT min(position) FROM next WHERE created_at >= :before), 9223372036854775807);

-- name: forget_keys
UPDATE messages SET send_key = NULL, content_hash = NULL
WHERE position > (SELECT through FROM keys_forgotten WHERE one = 1) AND position <= :through;

-- name: keys_forgotten
UPDATE keys_forgotten SET through = :through WHERE one = 1;

-- name: touch
UPDATE keys_forgotten SET through = through + :step WHERE one = 1;

-- name: forget_devices_of
DELETE FROM watermarks WHERE user_id = :user_id AND chat IN (
  SELECT chat FROM members WHERE tenant = :tenant AND user_id = :user_id);

-- name: chat_state
-- A chat with its number, counter and number of members.
SELECT c.chat, v.value, k.sequence_counter, c.members
FROM chats AS c JOIN chat_values AS v ON v.chat = c.chat LEFT JOIN counters AS k ON k.chat = c.chat
WHERE c.chat_id = :chat_id;

-- name: chat_of_pair
SELECT v.value FROM chats AS c JOIN chat_values AS v ON v.chat = c.chat
WHERE c.tenant = :tenant AND c.pair = :pair;

-- name: member
SELECT value FROM member_values WHERE chat = :chat AND user_id = :user_id;

-- name: owners
SELECT count(*) FROM members WHERE chat = :chat AND role = 'owner';

-- name: chat_counts
-- In how many chats each of some users is, and in how many of them by invitation.
SELECT json_group_object(u.value, json_array(
         (SELECT count(*) FROM members AS m WHERE m.tenant = :tenant AND m.user_id = u.value),
         (SELECT count(*) FROM members AS m INDEXED BY members_by_invitation
          WHERE m.tenant = :tenant AND m.user_id = u.value AND m.invited)))
FROM json_each(:users) AS u;

-- name: message_at
SELECT value FROM message_values WHERE chat = :chat AND sequence = :sequence;

-- name: create_chat
INSERT INTO chats (chat_id, tenant, kind, name, pair, epoch, first_sequence, halted, members, created_by, created_at)
VALUES (:chat_id, :tenant, :kind, :name, :pair, :epoch, :first_sequence, :halted, 0, :created_by, :created_at)
RETURNING chat;

-- name: create_counter
-- With its chat (at 0), or by recovery. `last_position` puts a new chat at the top of lists.
INSERT INTO counters (chat, sequence_counter, last_position)
VALUES (:chat, :counter, coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'messages'), 0))
ON CONFLICT (chat) DO UPDATE SET sequence_counter = excluded.sequence_counter;

-- name: update_chat
UPDATE chats SET name = :name, epoch = :epoch, first_sequence = :first_sequence, halted = :halted WHERE chat = :chat;

-- name: put_members
-- [[user_id, role, joined_at, invited], ...]; how somebody came stays as it is.
INSERT INTO members (chat, user_id, tenant, role, joined_at, invited)
SELECT :chat, value ->> 0, :tenant, value ->> 1, value ->> 2, value ->> 3
FROM json_each(:members) WHERE true
ON CONFLICT (chat, user_id) DO UPDATE SET role = excluded.role;

-- name: ban_state
-- Whether somebody is banned from a chat, whether by an operator, and how many are banned.
SELECT coalesce(sum(user_id = :user_id), 0), coalesce(sum(user_id = :user_id AND by_operator), 0), count(*)
FROM bans WHERE chat = :chat;

-- name: put_ban
INSERT INTO bans (chat, user_id, banned_by, banned_at, by_operator)
VALUES (:chat, :user_id, :banned_by, :banned_at, :by_operator)
ON CONFLICT (chat, user_id) DO UPDATE SET
  banned_by = excluded.banned_by, banned_at = excluded.banned_at, by_operator = excluded.by_operator;

-- name: drop_ban
DELETE FROM bans WHERE chat = :chat AND user_id = :user_id;

-- name: mute_state
-- Whether an operator muted somebody in a chat (null: not muted), and how many are muted.
SELECT (SELECT by_operator FROM mutes WHERE chat = :chat AND user_id = :user_id),
       (SELECT count(*) FROM mutes WHERE chat = :chat);

-- name: put_mute
INSERT INTO mutes (chat, user_id, by_operator) VALUES (:chat, :user_id, :by_operator)
ON CONFLICT (chat, user_id) DO UPDATE SET by_operator = excluded.by_operator;

-- name: drop_mute
DELETE FROM mutes WHERE chat = :chat AND user_id = :user_id;

-- name: drop_member
DELETE FROM members WHERE chat = :chat AND user_id = :user_id;

-- name: drop_watermarks
DELETE FROM watermarks WHERE chat = :chat AND user_id = :user_id;

-- name: count_members
UPDATE chats SET members = (SELECT count(*) FROM members WHERE chat = :chat) WHERE chat = :chat;

-- name: redact
-- The hash goes too: whoever guesses the text could prove it by that.
UPDATE messages SET content = '', content_hash = NULL WHERE chat = :chat AND sequence = :sequence;

-- name: erase
-- :sequences [sequence, ...] of one sender; an event says who is a member, and stays.
UPDATE messages SET content = '', content_hash = NULL
WHERE chat = :chat AND sequence IN (SELECT value FROM json_each(:sequences)) AND sender_id = :user_id AND kind = 'text';

-- name: retain
DELETE FROM messages WHERE chat = :chat AND sequence < :first_sequence;

-- name: put_gaps
-- [[first, last], ...]
INSERT OR IGNORE INTO gaps (chat, first_sequence, last_sequence)
SELECT :chat, value ->> 0, value ->> 1 FROM json_each(:gaps);

-- name: last_audit_hash
SELECT hash FROM audit WHERE node = :node ORDER BY number DESC LIMIT 1;

-- name: put_audit
INSERT INTO audit (at, actor, action, target, reason, details, record_id, node, hash)
VALUES (:at, :actor, :action, :target, :reason, :details, :record_id, :node, :hash);

-- name: mark
-- [[tenant, user_id, device_id, chat_id, epoch, delivered, read], ...]; what is not of a member's present epoch is
-- left out.
INSERT INTO watermarks (chat, user_id, device_id, epoch, delivered, read)
SELECT c.chat, m.user_id, w.value ->> 2, c.epoch, w.value ->> 5, w.value ->> 6
FROM json_each(:watermarks) AS w
CROSS JOIN chats AS c ON c.chat_id = w.value ->> 3 AND c.tenant = w.value ->> 0 AND c.epoch = w.value ->> 4
CROSS JOIN members AS m ON m.chat = c.chat AND m.user_id = w.value ->> 1
WHERE true
ON CONFLICT (chat, user_id, device_id) DO UPDATE SET
  delivered = CASE WHEN epoch = excluded.epoch THEN max(delivered, excluded.delivered) ELSE excluded.delivered END,
  read = CASE WHEN epoch = excluded.epoch THEN max(read, excluded.read) ELSE excluded.read END,
  epoch = excluded.epoch;

-- name: take_watermarks_along
-- The chat's epoch was raised: what counted in the one before counts in this, as far as the chat goes.
UPDATE watermarks SET epoch = v.epoch, delivered = min(delivered, v.head), read = min(read, v.head)
FROM chat_values AS v WHERE v.chat = :chat AND watermarks.chat = :chat AND watermarks.epoch = :epoch_before;

-- name: forget_devices
-- Of those just marked, the devices that are furthest behind while a member has more than :devices_max. Answers with
-- watermarks for the device '', which stands for all that have no name.
DELETE FROM watermarks WHERE (chat, user_id, device_id) IN (
  SELECT chat, user_id, device_id FROM (
    SELECT w.chat, w.user_id, w.device_id, row_number() OVER (
             PARTITION BY w.chat, w.user_id ORDER BY w.epoch DESC, w.delivered DESC, w.read DESC, w.device_id DESC) AS n
    FROM (SELECT DISTINCT c.chat, m.value ->> 1 AS user_id
          FROM json_each(:watermarks) AS m CROSS JOIN chats AS c ON c.chat_id = m.value ->> 3
          WHERE (SELECT count(*) FROM watermarks AS w
                 WHERE w.chat = c.chat AND w.user_id = m.value ->> 1 AND w.device_id <> '') > :devices_max) AS marked
    CROSS JOIN watermarks AS w ON w.chat = marked.chat AND w.user_id = marked.user_id AND w.device_id <> '')
  WHERE n > :devices_max)
RETURNING (SELECT tenant FROM chats AS c WHERE c.chat = watermarks.chat), user_id, '',
          (SELECT chat_id FROM chats AS c WHERE c.chat = watermarks.chat), epoch, delivered, read;

-- name: readable
-- A chat for somebody who wants to read it: its number, itself, and whether :user_id is a member.
SELECT v.chat, v.value, EXISTS (SELECT 1 FROM members AS m WHERE m.chat = v.chat AND m.user_id = :user_id)
FROM chat_values AS v WHERE v.chat_id = :chat_id;

-- name: messages_after
-- Up to :limit messages past :after, as long as they weigh no more than :bytes_max; the first one always. A message
-- weighs its content, unescaped, and 128 bytes: less than it takes when it is sent, and found without reading it.
WITH next AS (
  SELECT position, sequence, octet_length(content) + 128 AS bytes
  FROM messages WHERE chat = :chat AND sequence > :after ORDER BY sequence LIMIT :limit),
weighed AS (
  SELECT position, row_number() OVER upward AS n, sum(bytes) OVER upward AS bytes
  FROM next WINDOW upward AS (ORDER BY sequence ROWS UNBOUNDED PRECEDING))
SELECT '[' || coalesce(group_concat(v.value, ',' ORDER BY v.sequence), '') || ']'
FROM weighed CROSS JOIN message_values AS v ON v.position = weighed.position
WHERE weighed.n <= :one OR weighed.bytes <= :bytes_max;

-- name: messages_before
-- As messages_after, downwards from :before; the answer ascends all the same.
WITH next AS (
  SELECT position, sequence, octet_length(content) + 128 AS bytes
  FROM messages WHERE chat = :chat AND sequence < :before ORDER BY sequence DESC LIMIT :limit),
weighed AS (
  SELECT position, row_number() OVER downward AS n, sum(bytes) OVER downward AS bytes
  FROM next WINDOW downward AS (ORDER BY sequence DESC ROWS UNBOUNDED PRECEDING))
SELECT '[' || coalesce(group_concat(v.value, ',' ORDER BY v.sequence), '') || ']'
FROM weighed CROSS JOIN message_values AS v ON v.position = weighed.position
WHERE weighed.n <= :one OR weighed.bytes <= :bytes_max;

-- name: any_after
SELECT EXISTS (SELECT 1 FROM messages WHERE chat = :chat AND sequence > :sequence);

-- name: any_before
SELECT EXISTS (SELECT 1 FROM messages WHERE chat = :chat AND sequence < :sequence);

-- name: heads
SELECT json_group_object(v.chat_id, json_array(v.epoch, v.head))
FROM json_each(:chat_ids) AS c CROSS JOIN chat_values AS v ON v.chat_id = c.value;

-- name: memberships
-- For each of [[tenant, user_id], ...], in order, their chats: as long as these are :chats_max together, and of the first.
WITH asked AS MATERIALIZED (
  SELECT u.key AS place, u.value ->> 0 AS tenant, u.value ->> 1 AS user_id, sum((
    SELECT count(*) FROM members AS m INDEXED BY members_by_user
    WHERE m.tenant = u.value ->> 0 AND m.user_id = u.value ->> 1)) OVER (ORDER BY u.key) AS chats_so_far
  FROM json_each(:users) AS u)
SELECT json_group_array(json((
  SELECT json_group_object(v.chat_id, json_array(v.epoch, v.head))
  FROM members AS m INDEXED BY members_by_user CROSS JOIN chat_values AS v ON v.chat = m.chat
  WHERE m.tenant = asked.tenant AND m.user_id = asked.user_id)) ORDER BY asked.place)
FROM asked WHERE asked.chats_so_far <= :chats_max OR asked.place = 0;

-- name: memberships_in
-- Of [[[tenant, user_id], chat_id], ...] those that are memberships: their place in the list, and the chat's epoch and head.
SELECT json_group_array(json_array(a.key, v.epoch, v.head))
FROM json_each(:asked) AS a
CROSS JOIN chat_values AS v ON v.chat_id = a.value ->> 1 AND v.tenant = a.value ->> '$[0][0]'
CROSS JOIN members AS m ON m.chat = v.chat AND m.user_id = a.value ->> '$[0][1]';

-- name: list_edge
-- Where a page of a list of chats ended: at a chat whose head was :head then.
SELECT coalesce((SELECT m.position FROM messages AS m WHERE m.chat = c.chat AND m.sequence = :head), k.last_position, 0),
       c.chat
FROM chats AS c LEFT JOIN counters AS k ON k.chat = c.chat WHERE c.chat_id = :chat_id AND c.tenant = :tenant;

-- name: chats_of
-- A page of a user's chats, newest activity first. Of all chats of the user it looks at the counters only; of those on
-- the page at the rest, and at the :looked_at newest messages, which lie all over the file. :only [chat_id, ...] or null.
WITH page AS MATERIALIZED (
  SELECT m.chat, coalesce(k.last_position, 0) AS activity
  FROM members AS m INDEXED BY members_by_user LEFT JOIN counters AS k ON k.chat = m.chat
  WHERE m.tenant = :tenant AND m.user_id = :user_id
    AND (:edge_position IS NULL OR (coalesce(k.last_position, 0), m.chat) < (:edge_position, :edge_chat))
    AND (:only IS NULL OR m.chat IN (
      SELECT o.chat FROM json_each(:only) AS n CROSS JOIN chats AS o ON o.chat_id = n.value))
  ORDER BY activity DESC, m.chat DESC LIMIT :limit),
seen AS MATERIALIZED (
  SELECT p.chat, p.activity, coalesce(max(w.read), 0) AS read
  FROM page AS p JOIN chats AS c ON c.chat = p.chat
  LEFT JOIN watermarks AS w ON w.chat = p.chat AND w.user_id = :user_id AND w.epoch = c.epoch
  GROUP BY p.chat)
SELECT json_group_array(json_array(
         json(v.value), (SELECT m.role FROM members AS m WHERE m.chat = p.chat AND m.user_id = :user_id),
         CASE c.kind WHEN 'direct' THEN (
           SELECT group_concat(o.user_id, ', ' ORDER BY o.user_id) FROM members AS o
           WHERE o.chat = p.chat AND o.user_id <> :user_id) ELSE c.name END,
         c.members, p.read,
         (SELECT count(*) FROM messages AS u
          WHERE u.chat = p.chat AND u.sequence > max(p.read, v.head - :looked_at)
            AND u.kind = 'text' AND u.sender_id <> :user_id AND octet_length(u.content) > 0),
         json((SELECT l.value FROM message_values AS l WHERE l.chat = p.chat AND l.sequence = v.head)))
       ORDER BY p.activity DESC, p.chat DESC)
FROM seen AS p CROSS JOIN chats AS c ON c.chat = p.chat CROSS JOIN chat_values AS v ON v.chat = p.chat;

-- name: members_of
SELECT json_group_array(json(m.value) ORDER BY m.user_id)
FROM chats AS c CROSS JOIN member_values AS m ON m.chat = c.chat WHERE c.chat_id = :chat_id;

-- name: bans_of
SELECT json_group_array(json_object('user_id', b.user_id, 'banned_by', b.banned_by, 'banned_at', b.banned_at,
                                    'by_operator', json(iif(b.by_operator, 'true', 'false')))
                        ORDER BY b.user_id)
FROM chats AS c CROSS JOIN bans AS b ON b.chat = c.chat WHERE c.chat_id = :chat_id;

-- name: mutes_of
SELECT json_group_array(json_object('user_id', q.user_id, 'by_operator', json(iif(q.by_operator, 'true', 'false')))
                        ORDER BY q.user_id)
FROM chats AS c CROSS JOIN mutes AS q ON q.chat = c.chat WHERE c.chat_id = :chat_id;

-- name: watermarks_of
SELECT json_group_array(json_array(json_array(c.tenant, w.user_id), w.device_id, c.chat_id, w.epoch, w.delivered, w.read)
                        ORDER BY w.user_id, w.device_id)
FROM chats AS c CROSS JOIN watermarks AS w ON w.chat = c.chat AND w.epoch = c.epoch WHERE c.chat_id = :chat_id;

-- name: numbering
-- The highest stored sequence of a chat, how many are stored, and how many from :first on.
SELECT coalesce(max(sequence), 0), count(*), count(*) FILTER (WHERE sequence >= :first)
FROM messages WHERE chat = :chat;

-- name: count_between
SELECT count(*) FROM messages WHERE chat = :chat AND sequence BETWEEN :first AND :last;

-- name: recorded_gaps
SELECT json_group_array(json_array(first_sequence, last_sequence) ORDER BY first_sequence, last_sequence)
FROM gaps WHERE chat = :chat;

-- name: audit_after
SELECT json_group_array(json_object('number', number, 'at', at, 'actor', actor, 'action', action, 'target', target,
                                    'reason', reason, 'details', details, 'record_id', record_id, 'node', node,
                                    'hash', hash) ORDER BY number)
FROM (SELECT * FROM audit WHERE number > :after ORDER BY number LIMIT :limit);

-- name: audit_end
SELECT coalesce(max(number), 0) FROM audit;

-- name: log_end
-- Messages and log events share the positions; this counter is of both.
SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'messages'), 0);

-- name: put_log_event
INSERT INTO log_events (position, chat, epoch, kind, content) VALUES (:position, :chat, :epoch, :kind, :content);

-- name: move_log_end
UPDATE sqlite_sequence SET seq = :position WHERE name = 'messages';

-- name: log_after
-- The next entries of both tables [[position, tenant, chat_id, epoch, kind or null for a message, value], ...].
SELECT '[' || coalesce(group_concat(value, ',' ORDER BY position), '') || ']'
FROM (SELECT position, value FROM log_values WHERE position > :after ORDER BY position LIMIT :limit);

-- name: log_next
-- The bytes of one entry, which may make no sense: a text that is not UTF-8 could not even be fetched as one.
SELECT position, CAST(value AS BLOB) FROM log_values WHERE position > :after ORDER BY position LIMIT 1;

-- name: sent_by
-- Of the :look entries of the log after :after: where :user_id of :tenant sent something that is still there, and the
-- position of the last one that was looked at. Senders have no index: every send would pay for it.
WITH looked AS MATERIALIZED (
  SELECT position, chat, sequence, sender_id, kind, octet_length(content) > 0 AS is_there FROM messages
  WHERE position > :after ORDER BY position LIMIT :look)
SELECT (
  SELECT json_group_array(json_array(c.chat_id, e.sequence) ORDER BY e.position)
  FROM looked AS e CROSS JOIN chats AS c ON c.chat = e.chat
  WHERE e.sender_id = :user_id AND c.tenant = :tenant AND e.kind = 'text' AND e.is_there
), (SELECT max(position) FROM looked);

-- name: active_since
-- Of the :look chats after :after: those whose newest message is not older than :at, and the last one that was looked at.
WITH looked AS MATERIALIZED (
  SELECT chat, chat_id, tenant FROM chats WHERE chat > :after ORDER BY chat LIMIT :look)
SELECT (
  SELECT json_group_array(json_array(looked.tenant, looked.chat_id) ORDER BY looked.chat) FROM looked
  WHERE (SELECT m.created_at FROM messages AS m WHERE m.chat = looked.chat ORDER BY m.sequence DESC LIMIT 1) >= :at
), (SELECT max(chat) FROM looked);

-- name: damaged
-- Of the :look chats after :after: those whose counter is missing or behind, and the last one that was looked at.
WITH looked AS MATERIALIZED (
  SELECT chat, chat_id, halted FROM chats WHERE chat > :after ORDER BY chat LIMIT :look)
SELECT (
  SELECT json_group_array(looked.chat_id ORDER BY looked.chat)
  FROM looked LEFT JOIN counters AS k ON k.chat = looked.chat
  WHERE looked.halted IS NULL AND (k.chat IS NULL OR EXISTS (
    SELECT 1 FROM messages AS m WHERE m.chat = looked.chat AND m.sequence > k.sequence_counter))
), (SELECT max(chat) FROM looked);

-- name: counter_of
-- A chat that is not halted: its counter, and whether there are messages beyond it.
SELECT k.sequence_counter, EXISTS (
  SELECT 1 FROM messages AS m WHERE m.chat = c.chat AND m.sequence > k.sequence_counter)
FROM chats AS c LEFT JOIN counters AS k ON k.chat = c.chat WHERE c.chat_id = :chat_id AND c.halted IS NULL;

-- name: halted
-- How many chats are halted, and the first :limit of them.
SELECT (SELECT count(*) FROM chats WHERE halted IS NOT NULL), (
  SELECT json_group_array(json_object('chat_id', h.chat_id, 'tenant', h.tenant, 'why', h.halted) ORDER BY h.chat_id)
  FROM (SELECT chat_id, tenant, halted FROM chats WHERE halted IS NOT NULL ORDER BY chat_id LIMIT :limit) AS h);

-- name: chats_end
SELECT coalesce(max(chat), 0) FROM chats;

-- name: take_all_watermarks_along
-- Before raise_all_epochs: what counts in a chat's epoch will count in its next. They are in one file with the
-- messages, so none is beyond a head.
UPDATE watermarks SET epoch = max(c.epoch + 1, :epoch_min)
FROM chats AS c WHERE c.chat = watermarks.chat AND c.epoch = watermarks.epoch;

-- name: raise_all_epochs
-- After a restore: what clients have may be newer than what is stored. One more than before would be given twice to
-- whoever restores the same backup twice, so there is a least that only time moves.
UPDATE chats SET epoch = max(epoch + 1, :epoch_min);
