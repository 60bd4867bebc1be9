-- append_1: number a group of sends, in order. Keys are different from each other: the caller merges equal ones.
--
-- chat_ids, tenants: the chats of the group, each once; the other arguments are by send. places: which of the chats.
-- codes: 0 stored now, 1 stored before, 2 the key was used for another content, 3 unknown chat, 4 the sender is not a
-- member, 5 muted in the tenant, 6 muted in the chat, 7 halted, 8 the counter is missing and 9 it is behind the
-- messages: these two halt the chat. created_ats: of code 0. known: JSON of code 1, [[place, message], ...].
--
-- First the chats are locked, then the shards, each in order, to the commit. The rest is read by a later statement: one
-- that waited for a lock reads other tables as they were before it waited, and a member removed meanwhile could post.
-- The shard's row is only locked: its dead versions would pile up behind any long transaction on this server.
CREATE OR REPLACE FUNCTION holdfast_chats.append_1(
    chat_ids text[], tenants text[], places integer[], senders text[], client_ids text[], send_keys bigint[],
    hashes bytea[], contents text[], content_types text[], message_ids text[], muted boolean[],
    OUT codes smallint[], OUT sequences bigint[], OUT created_ats text[], OUT known text
)
LANGUAGE plpgsql AS $$
DECLARE
    one      record;
    found    holdfast_chats.chat[] := '{}';  -- by place
    rows     tid[] := '{}';                  -- where they are
    shards   smallint[] := '{}';
    moment   timestamptz;
    updated  bigint;
    expected bigint;
BEGIN
    -- Backwards through the index (BETWEEN: an equality would lose its order), for the newest version is at the end: a
    -- transaction that is open elsewhere keeps all the others, and 10,000 of them doubled the cost of a group. For the
    -- same reason the update below finds its rows by where they are.
    FOR one IN SELECT g.place, l.* FROM (SELECT * FROM unnest(chat_ids, tenants) WITH ORDINALITY
                                                 AS u(chat_id, tenant, place) ORDER BY u.chat_id) AS g
                CROSS JOIN LATERAL (SELECT c, c.ctid AS row FROM holdfast_chats.chat AS c
                                     WHERE c.chat_id BETWEEN g.chat_id AND g.chat_id AND c.tenant = g.tenant
                                     ORDER BY c.chat_id DESC LIMIT 1 FOR NO KEY UPDATE) AS l LOOP
        found[one.place] := one.c;
        rows[one.place] := one.row;
        shards := shards || (one.c).shard;
    END LOOP;
    PERFORM FROM holdfast_chats.shard AS s WHERE s.shard = ANY (shards) ORDER BY s.shard FOR NO KEY UPDATE;
    moment := clock_timestamp();

    WITH judged AS MATERIALIZED (
        SELECT g.n, g.place, g.sender, g.client_id, g.send_key, g.hash, g.content, g.content_type, g.message_id,
               c.chat, c.shard, c.counter, greatest(moment, c.active_at) + g.n * interval '1 microsecond' AS created_at,
               k.sequence AS known_sequence,
               CASE WHEN c.chat IS NULL THEN 3
                    WHEN k.content_hash = g.hash OR k.content_hash IS NULL AND k.sequence IS NOT NULL THEN 1
                    WHEN k.sequence IS NOT NULL THEN 2
                    WHEN m.chat IS NULL THEN 4
                    WHEN g.is_muted THEN 5
                    WHEN q.chat IS NOT NULL THEN 6
                    WHEN c.halted IS NOT NULL THEN 7
                    WHEN c.counter IS NULL THEN 8
                    WHEN c.counter + g.n > 9007199254740991 THEN 7
                    WHEN EXISTS (SELECT FROM holdfast_chats.message AS t
                                  WHERE t.chat = c.chat AND t.sequence > c.counter) THEN 9
                    ELSE 0 END AS code
          FROM unnest(places, senders, client_ids, send_keys, hashes, contents, content_types, message_ids, muted)
               WITH ORDINALITY
               AS g(place, sender, client_id, send_key, hash, content, content_type, message_id, is_muted, n)
         CROSS JOIN LATERAL unnest(ARRAY[found[g.place]]) AS c
          -- OFFSET 0: look up each by its whole key. A plan for tables that are small would compare with all of a chat.
          LEFT JOIN LATERAL (SELECT o.chat FROM holdfast_chats.member AS o
                              WHERE o.chat = c.chat AND o.user_id = g.sender OFFSET 0) AS m ON true
          LEFT JOIN LATERAL (SELECT o.chat FROM holdfast_chats.mute AS o
                              WHERE o.chat = c.chat AND o.user_id = g.sender OFFSET 0) AS q ON true
          LEFT JOIN LATERAL (SELECT o.sequence, o.content_hash FROM holdfast_chats.message AS o
                              WHERE o.chat = c.chat AND o.send_key = g.send_key AND o.sender_id = g.sender
                                AND o.client_message_id = g.client_id OFFSET 0) AS k ON true
    ), numbered AS MATERIALIZED (
        SELECT *, CASE WHEN code = 0 THEN counter + row_number() OVER (PARTITION BY code, chat ORDER BY n) END AS sequence,
               CASE WHEN code = 0 THEN row_number() OVER (PARTITION BY code, shard ORDER BY n) END AS nth
          FROM judged
    ), drawn AS MATERIALIZED (
        SELECT s.shard, (SELECT min(n.drawn) FROM (SELECT nextval(s.positions) AS drawn
                                                     FROM generate_series(1, (fresh.nth + 511) / 512)) AS n) AS base
          FROM (SELECT shard, max(nth) AS nth FROM numbered WHERE code = 0 GROUP BY shard) AS fresh
          JOIN holdfast_chats.shard AS s ON s.shard = fresh.shard
    ), stored AS (
        INSERT INTO holdfast_chats.message (chat, sequence, position, send_key, created_at, shard, kind, sender_id,
                                            client_message_id, content_hash, message_id, content, content_type)
        SELECT f.chat, f.sequence, d.base + f.nth - 1, f.send_key, f.created_at, f.shard, 'text', f.sender,
               f.client_id, f.hash, f.message_id, f.content, f.content_type
          FROM numbered AS f JOIN drawn AS d ON d.shard = f.shard WHERE f.code = 0 ORDER BY f.n
    ), moved AS (
        UPDATE holdfast_chats.chat AS c
           SET counter = coalesce(f.sequence, c.counter), active_at = CASE f.code WHEN 0 THEN f.at ELSE c.active_at END,
               halted = CASE f.code WHEN 8 THEN 'its counter is missing'
                                    WHEN 9 THEN 'its counter is behind its messages' END,
               version = c.version + CASE f.code WHEN 0 THEN 0 ELSE 1 END
          FROM (SELECT place, max(code) AS code, max(sequence) AS sequence, max(created_at) AS at
                  FROM numbered WHERE code IN (0, 8, 9) GROUP BY place) AS f
         WHERE c.ctid = rows[f.place]
        RETURNING c.chat
    )
    SELECT array_agg(o.code), array_agg(coalesce(o.sequence, o.known_sequence)), array_agg(o.created),
           (SELECT count(*) FROM moved), count(DISTINCT o.place) FILTER (WHERE o.code IN (0, 8, 9))
      INTO codes, sequences, created_ats, updated, expected
      FROM (SELECT f.code, f.place, f.sequence, f.known_sequence,
                   CASE f.code WHEN 0 THEN holdfast_chats.text_of_time(f.created_at) END AS created
              FROM numbered AS f ORDER BY f.n) AS o;
    IF updated <> expected THEN
        RAISE EXCEPTION 'a counter was not where it was locked' USING ERRCODE = 'serialization_failure';
    END IF;
    IF 1 = ANY (codes) THEN
        SELECT json_agg(json_build_array(k.n, v.value)) INTO known
          FROM unnest(places, codes, sequences) WITH ORDINALITY AS k(place, code, sequence, n)
         CROSS JOIN LATERAL (SELECT o.value FROM holdfast_chats.message_value AS o
                              WHERE o.chat = (found[k.place]).chat AND o.sequence = k.sequence OFFSET 0) AS v
         WHERE k.code = 1;
    END IF;
END $$;

-- append_and_commit_1: append_1 in a commit of its own; needs_standby: refused while no standby confirms commits.
--
-- A function called by SELECT commits at the client's Sync, and a node cut off before it would hold its locks beyond
-- every timeout. A procedure that commits has let go of them when the node is told.
CREATE OR REPLACE PROCEDURE holdfast_chats.append_and_commit_1(
    chat_ids text[], tenants text[], places integer[], senders text[], client_ids text[], send_keys bigint[],
    hashes bytea[], contents text[], content_types text[], message_ids text[], muted boolean[], needs_standby boolean,
    OUT codes smallint[], OUT sequences bigint[], OUT created_ats text[], OUT known text
)
LANGUAGE plpgsql AS $$
BEGIN
    IF needs_standby AND current_setting('synchronous_standby_names') = '' THEN
        RAISE EXCEPTION 'no standby confirms commits' USING ERRCODE = 'HF001';
    END IF;
    SELECT a.codes, a.sequences, a.created_ats, a.known INTO codes, sequences, created_ats, known
      FROM holdfast_chats.append_1(chat_ids, tenants, places, senders, client_ids, send_keys, hashes, contents,
                                   content_types, message_ids, muted) AS a;
    COMMIT;
END $$;
