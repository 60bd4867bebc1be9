-- Writes that change no chat, each in a commit of its own.

CREATE OR REPLACE PROCEDURE holdfast_chats.record_and_commit_1(note jsonb)
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM holdfast_chats.record_1(note);
    COMMIT;
END $$;

-- begin_1: take the key of a request. is_taken: by this call; else what it stands for. is_running: on another node.
CREATE OR REPLACE PROCEDURE holdfast_chats.begin_1(
    in_tenant text, in_user_id text, in_key text, in_fingerprint text, in_at text, in_node text, in_seconds float8,
    OUT is_taken boolean, OUT fingerprint text, OUT answer text, OUT is_running boolean
)
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO holdfast_chats.answer (tenant, user_id, key, fingerprint, answer, at, node, until)
    VALUES (in_tenant, in_user_id, in_key, in_fingerprint, '', in_at, in_node,
            clock_timestamp() + make_interval(secs => in_seconds)) ON CONFLICT DO NOTHING;
    is_taken := FOUND;
    SELECT a.fingerprint, a.answer, a.answer = '' AND a.node <> in_node AND clock_timestamp() < a.until
      INTO fingerprint, answer, is_running FROM holdfast_chats.answer AS a
     WHERE a.tenant = in_tenant AND a.user_id = in_user_id AND a.key = in_key;
    COMMIT;
END $$;

-- keep_1: store the answer of a request; null releases its key.
CREATE OR REPLACE PROCEDURE holdfast_chats.keep_1(in_tenant text, in_user_id text, in_key text, new_answer text)
LANGUAGE plpgsql AS $$
BEGIN
    IF new_answer IS NULL THEN
        DELETE FROM holdfast_chats.answer AS a
         WHERE a.tenant = in_tenant AND a.user_id = in_user_id AND a.key = in_key;
    ELSE
        UPDATE holdfast_chats.answer AS a SET answer = new_answer
         WHERE a.tenant = in_tenant AND a.user_id = in_user_id AND a.key = in_key;
    END IF;
    COMMIT;
END $$;

-- forget_answers_1: at most most, the oldest first; forgotten: how many.
CREATE OR REPLACE PROCEDURE holdfast_chats.forget_answers_1(before text, most integer, OUT forgotten integer)
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM holdfast_chats.answer AS a USING (
        SELECT o.tenant, o.user_id, o.key FROM holdfast_chats.answer AS o
         WHERE o.at < before ORDER BY o.at LIMIT most FOR UPDATE SKIP LOCKED) AS old
     WHERE a.tenant = old.tenant AND a.user_id = old.user_id AND a.key = old.key;
    GET DIAGNOSTICS forgotten = ROW_COUNT;
    COMMIT;
END $$;

CREATE OR REPLACE PROCEDURE holdfast_chats.forget_answers_of_1(in_tenant text, in_user_id text)
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM holdfast_chats.answer AS a WHERE a.tenant = in_tenant AND a.user_id = in_user_id;
    COMMIT;
END $$;

-- forget_send_keys_1: of at most most messages, in the order of each shard up to the first that is not older.
CREATE OR REPLACE PROCEDURE holdfast_chats.forget_send_keys_1(before timestamptz, most integer, OUT forgotten integer)
LANGUAGE plpgsql AS $$
DECLARE
    done record;
    last bigint;
    size integer;
BEGIN
    forgotten := 0;
    FOR done IN SELECT k.shard, k.through FROM holdfast_chats.keys_forgotten AS k ORDER BY k.shard FOR UPDATE LOOP
        EXIT WHEN forgotten >= most;
        WITH next AS MATERIALIZED (
            SELECT m.position, m.created_at FROM holdfast_chats.message AS m
             WHERE m.shard = done.shard AND m.position > done.through ORDER BY m.position LIMIT most - forgotten)
        SELECT max(n.position), count(*) INTO last, size FROM next AS n
         WHERE n.position < coalesce((SELECT min(y.position) FROM next AS y WHERE y.created_at >= before),
                                     9223372036854775807);
        CONTINUE WHEN size = 0;
        UPDATE holdfast_chats.message AS m SET send_key = NULL, content_hash = NULL
         WHERE m.shard = done.shard AND m.position > done.through AND m.position <= last;
        UPDATE holdfast_chats.keys_forgotten AS k SET through = last WHERE k.shard = done.shard;
        forgotten := forgotten + size;
    END LOOP;
    COMMIT;
END $$;

-- forget_log_events_1: at most most events that are old and behind every reader (behind: positions by shard). The last
-- entry of a shard stays: it is where the log ends. forgotten: how many.
CREATE OR REPLACE PROCEDURE holdfast_chats.forget_log_events_1(
    before timestamptz, behind bigint[], most integer, OUT forgotten integer
)
LANGUAGE plpgsql AS $$
DECLARE
    of_shard smallint;
    last     bigint;
    size     integer;
BEGIN
    forgotten := 0;
    FOR of_shard IN SELECT s.shard FROM holdfast_chats.shard AS s ORDER BY s.shard LOOP
        EXIT WHEN forgotten >= most;
        PERFORM FROM holdfast_chats.shard AS s WHERE s.shard = of_shard FOR NO KEY UPDATE;
        SELECT max(e.position), count(*) INTO last, size
          FROM (SELECT o.position FROM holdfast_chats.log_event AS o
                 WHERE o.shard = of_shard AND o.at < before AND o.position <= behind[of_shard + 1]
                   AND o.position < greatest(
                        (SELECT max(m.position) FROM holdfast_chats.message AS m WHERE m.shard = of_shard),
                        (SELECT max(l.position) FROM holdfast_chats.log_event AS l WHERE l.shard = of_shard))
                 ORDER BY o.position LIMIT most - forgotten) AS e;
        CONTINUE WHEN size = 0;
        DELETE FROM holdfast_chats.log_event AS e WHERE e.shard = of_shard AND e.position <= last;
        UPDATE holdfast_chats.shard AS s SET first_position = last + 1 WHERE s.shard = of_shard;
        forgotten := forgotten + size;
    END LOOP;
    COMMIT;
END $$;

-- mark_1: merge watermarks. Rows are locked in order: two nodes that mark the same devices would deadlock otherwise.
-- Of more than devices_max named devices of a member, those furthest behind are merged into the device ''.
CREATE OR REPLACE PROCEDURE holdfast_chats.mark_1(
    tenants text[], user_ids text[], device_ids text[], chat_ids text[], epochs bigint[], delivereds bigint[],
    reads bigint[], devices_max integer
)
LANGUAGE plpgsql AS $$
DECLARE
    people record;
BEGIN
    INSERT INTO holdfast_chats.watermark AS w (chat, user_id, device_id, epoch, delivered, read)
    SELECT c.chat, m.user_id, g.device_id, c.epoch, max(g.delivered), max(g.read)
      FROM unnest(tenants, user_ids, device_ids, chat_ids, epochs, delivereds, reads)
           AS g(tenant, user_id, device_id, chat_id, epoch, delivered, read)
      JOIN holdfast_chats.chat AS c
        ON c.chat_id = g.chat_id AND c.tenant = g.tenant
       AND c.epoch = g.epoch - (SELECT epoch_base FROM holdfast_chats.cluster)
      JOIN holdfast_chats.member AS m ON m.chat = c.chat AND m.user_id = g.user_id
     GROUP BY c.chat, m.user_id, g.device_id, c.epoch
     ORDER BY c.chat, m.user_id, g.device_id
    ON CONFLICT (chat, user_id, device_id) DO UPDATE
       SET delivered = CASE WHEN w.epoch = excluded.epoch THEN greatest(w.delivered, excluded.delivered)
                            ELSE excluded.delivered END,
           read = CASE WHEN w.epoch = excluded.epoch THEN greatest(w.read, excluded.read) ELSE excluded.read END,
           epoch = excluded.epoch;
    FOR people IN
        SELECT DISTINCT c.chat, g.user_id, c.epoch
          FROM unnest(user_ids, chat_ids) AS g(user_id, chat_id) JOIN holdfast_chats.chat AS c ON c.chat_id = g.chat_id
         WHERE (SELECT count(*) FROM holdfast_chats.watermark AS w
                 WHERE w.chat = c.chat AND w.user_id = g.user_id AND w.device_id <> '') > devices_max
         ORDER BY c.chat, g.user_id
    LOOP
        PERFORM holdfast_chats.merge_devices_1(people.chat, people.user_id, people.epoch, devices_max);
    END LOOP;
    COMMIT;
END $$;

CREATE OR REPLACE FUNCTION holdfast_chats.merge_devices_1(
    in_chat bigint, in_user_id text, chat_epoch bigint, devices_max integer
) RETURNS void
LANGUAGE sql AS $$
    WITH gone AS (
        DELETE FROM holdfast_chats.watermark AS w
         WHERE w.chat = in_chat AND w.user_id = in_user_id AND w.device_id IN (
            SELECT o.device_id FROM holdfast_chats.watermark AS o
             WHERE o.chat = in_chat AND o.user_id = in_user_id AND o.device_id <> ''
             ORDER BY o.epoch DESC, o.delivered DESC, o.read DESC, o.device_id DESC OFFSET devices_max)
        RETURNING w.epoch, w.delivered, w.read
    )
    INSERT INTO holdfast_chats.watermark AS w (chat, user_id, device_id, epoch, delivered, read)
    SELECT in_chat, in_user_id, '', chat_epoch, max(g.delivered), max(g.read)
      FROM gone AS g WHERE g.epoch = chat_epoch HAVING count(*) > 0
    ON CONFLICT (chat, user_id, device_id) DO UPDATE
       SET delivered = CASE WHEN w.epoch = excluded.epoch THEN greatest(w.delivered, excluded.delivered)
                            ELSE excluded.delivered END,
           read = CASE WHEN w.epoch = excluded.epoch THEN greatest(w.read, excluded.read) ELSE excluded.read END,
           epoch = excluded.epoch;
$$;

CREATE OR REPLACE PROCEDURE holdfast_chats.forget_devices_1(in_tenant text, in_user_id text)
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM holdfast_chats.watermark AS w USING holdfast_chats.member AS m
     WHERE m.tenant = in_tenant AND m.user_id = in_user_id AND w.chat = m.chat AND w.user_id = in_user_id;
    COMMIT;
END $$;

CREATE OR REPLACE PROCEDURE holdfast_chats.touch_1()
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE holdfast_chats.touched SET at = clock_timestamp();
    COMMIT;
END $$;
