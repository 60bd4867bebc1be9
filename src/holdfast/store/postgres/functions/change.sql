-- change_1: write what was decided about a command, if the chat is still as it was when the decision was made.
--
-- plan: a ChangePlan as JSON (see store/postgres/change.py); seen_version: of the chat, null if it is to be created;
-- seen_base: of the epochs.
-- outcome: done; moved (nothing was written: read and decide again); no_counter, taken (the chat is halted).
-- head, epoch: of the chat afterwards; created_at: of the event.
CREATE OR REPLACE PROCEDURE holdfast_chats.change_1(
    plan jsonb, seen_version bigint, seen_base bigint,
    OUT outcome text, OUT head bigint, OUT epoch bigint, OUT created_at text
)
LANGUAGE plpgsql AS $$
DECLARE
    row   holdfast_chats.chat;
    now_at timestamptz;
    event jsonb := plan -> 'event';
    place bigint;
BEGIN
    row := holdfast_chats.take_chat_1(plan, seen_version, seen_base);
    IF row.chat IS NULL THEN
        outcome := 'moved';
        COMMIT;
        RETURN;
    END IF;
    IF event IS NOT NULL THEN
        IF row.counter IS NULL THEN
            outcome := 'no_counter';
        ELSIF EXISTS (SELECT FROM holdfast_chats.message AS t WHERE t.chat = row.chat AND t.sequence > row.counter) THEN
            outcome := 'taken';
        END IF;
        IF outcome IS NOT NULL THEN
            UPDATE holdfast_chats.chat AS c
               SET version = c.version + 1, halted = CASE outcome WHEN 'taken' THEN 'its counter is behind its messages'
                                                                  ELSE 'its counter is missing' END
             WHERE c.chat = row.chat;
            COMMIT;
            RETURN;
        END IF;
    END IF;

    now_at := greatest(clock_timestamp(), row.active_at + interval '1 microsecond');
    IF (plan ->> 'counter') IS NOT NULL THEN
        row.active_at := CASE WHEN row.counter IS NULL THEN now_at ELSE row.active_at END;
        row.counter := greatest(row.counter, (plan ->> 'counter')::bigint);
    END IF;
    head := coalesce(row.counter, (SELECT max(m.sequence) FROM holdfast_chats.message AS m WHERE m.chat = row.chat), 0);
    PERFORM holdfast_chats.change_people_1(row.chat, plan);
    PERFORM holdfast_chats.forget_contents_1(row.chat, plan);
    IF (plan ->> 'raised')::boolean THEN
        row.epoch := row.epoch + 1;
        PERFORM FROM holdfast_chats.watermark AS w
          WHERE w.chat = row.chat ORDER BY w.chat, w.user_id, w.device_id FOR UPDATE;  -- as `mark` does
        UPDATE holdfast_chats.watermark AS w
           SET epoch = row.epoch, delivered = least(w.delivered, head), read = least(w.read, head)
         WHERE w.chat = row.chat AND w.epoch = row.epoch - 1;
    END IF;
    epoch := row.epoch + seen_base;

    IF event IS NOT NULL OR (plan ->> 'create')::boolean OR (plan ->> 'raised')::boolean OR (plan ->> 'retain')::boolean THEN
        place := holdfast_chats.take_positions_1(row.shard);
        INSERT INTO holdfast_chats.log_event (shard, position, kind, chat, epoch, users, numbers, at)
        SELECT row.shard, place, e.kind, row.chat, row.epoch, e.users, e.numbers, now_at
          FROM (VALUES ('ChatCreated', (plan ->> 'create')::boolean,
                        ARRAY (SELECT m ->> 0 FROM jsonb_array_elements(plan -> 'put') AS m), '{}'::bigint[]),
                       ('EpochRaised', (plan ->> 'raised')::boolean, '{}', ARRAY[head]),
                       -- No entry for readers: it keeps the log's end where it was when its last messages are deleted.
                       ('Retained', (plan ->> 'retain')::boolean, '{}', '{}')) AS e(kind, is_planned, users, numbers)
         WHERE e.is_planned;
    END IF;
    IF event IS NOT NULL THEN
        head := row.counter + 1;
        INSERT INTO holdfast_chats.message (chat, sequence, position, created_at, shard, kind, sender_id, message_id,
                                            content, content_type)
        VALUES (row.chat, head, place + 1, now_at, row.shard, 'event', event ->> 'sender_id', event ->> 'message_id',
                event ->> 'content', event ->> 'content_type');
        row.counter := head;
        row.active_at := now_at;
        created_at := holdfast_chats.text_of_time(now_at);
    END IF;
    IF (plan ->> 'update')::boolean THEN
        UPDATE holdfast_chats.chat AS c
           SET name = plan ->> 'name', halted = plan ->> 'halted', first_sequence = (plan ->> 'first_sequence')::bigint,
               epoch = row.epoch, counter = row.counter, active_at = row.active_at, version = c.version + 1,
               members = (SELECT count(*) FROM holdfast_chats.member AS m WHERE m.chat = row.chat)
         WHERE c.chat = row.chat;
    END IF;
    PERFORM holdfast_chats.record_1(plan -> 'audit');
    PERFORM holdfast_chats.put_answer_1(plan -> 'key', plan -> 'answer', epoch, head, created_at);
    outcome := 'done';
    COMMIT;
END $$;

-- take_chat_1: the plan's chat, created or locked to the commit; null if it is not as it was seen. A plan that changes
-- nothing needs no version.
CREATE OR REPLACE FUNCTION holdfast_chats.take_chat_1(plan jsonb, seen_version bigint, seen_base bigint)
RETURNS holdfast_chats.chat
LANGUAGE plpgsql AS $$
DECLARE
    row holdfast_chats.chat;
BEGIN
    IF (plan ->> 'create')::boolean THEN
        INSERT INTO holdfast_chats.chat (shard, epoch, counter, active_at, first_sequence, members, chat_id, tenant, kind,
                                         name, pair, created_by, created_at)
        VALUES ((plan ->> 'shard')::smallint, 1, 0, clock_timestamp(), 1, 0, plan ->> 'chat_id', plan ->> 'tenant',
                plan ->> 'kind', plan ->> 'name', plan ->> 'pair', plan ->> 'created_by', plan ->> 'created_at')
        ON CONFLICT DO NOTHING RETURNING * INTO row;
    ELSE
        SELECT * INTO row FROM holdfast_chats.chat AS c WHERE c.chat_id = plan ->> 'chat_id' FOR NO KEY UPDATE;
        IF row.version <> seen_version AND (plan ->> 'update')::boolean THEN
            RETURN NULL;
        END IF;
    END IF;
    IF (SELECT epoch_base FROM holdfast_chats.cluster) <> seen_base THEN
        IF (plan ->> 'create')::boolean THEN
            RAISE EXCEPTION 'all epochs were raised meanwhile' USING ERRCODE = 'serialization_failure';
        END IF;
        RETURN NULL;
    END IF;
    RETURN row;
END $$;

-- change_people_1: members, bans and mutes of a chat, as planned.
CREATE OR REPLACE FUNCTION holdfast_chats.change_people_1(in_chat bigint, plan jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF jsonb_array_length(plan -> 'put') > 0 THEN
        -- Of somebody who was removed while a device's watermark came.
        DELETE FROM holdfast_chats.watermark AS w USING jsonb_array_elements(plan -> 'put') AS p
         WHERE w.chat = in_chat AND w.user_id = p ->> 0
           AND NOT EXISTS (SELECT FROM holdfast_chats.member AS m WHERE m.chat = in_chat AND m.user_id = p ->> 0);
        INSERT INTO holdfast_chats.member (chat, user_id, tenant, role, joined_at, invited)
        SELECT in_chat, p ->> 0, plan ->> 'tenant', p ->> 1, p ->> 2, (p ->> 3)::boolean
          FROM jsonb_array_elements(plan -> 'put') AS p
        ON CONFLICT (chat, user_id) DO UPDATE SET role = excluded.role;
    END IF;
    IF jsonb_array_length(plan -> 'drop') > 0 THEN
        DELETE FROM holdfast_chats.member AS m USING jsonb_array_elements_text(plan -> 'drop') AS d
         WHERE m.chat = in_chat AND m.user_id = d;
        DELETE FROM holdfast_chats.watermark AS w USING jsonb_array_elements_text(plan -> 'drop') AS d
         WHERE w.chat = in_chat AND w.user_id = d;
    END IF;
    INSERT INTO holdfast_chats.ban (chat, user_id, banned_by, banned_at, by_operator)
    SELECT in_chat, b.user_id, b.banned_by, b.banned_at, b.by_operator
      FROM jsonb_populate_record(NULL::holdfast_chats.ban, plan -> 'ban') AS b WHERE b.user_id IS NOT NULL
    ON CONFLICT (chat, user_id) DO UPDATE
       SET banned_by = excluded.banned_by, banned_at = excluded.banned_at, by_operator = excluded.by_operator;
    DELETE FROM holdfast_chats.ban AS b WHERE b.chat = in_chat AND b.user_id = plan ->> 'unban';
    INSERT INTO holdfast_chats.mute (chat, user_id, by_operator)
    SELECT in_chat, q.user_id, q.by_operator
      FROM jsonb_populate_record(NULL::holdfast_chats.mute, plan -> 'mute') AS q WHERE q.user_id IS NOT NULL
    ON CONFLICT (chat, user_id) DO UPDATE SET by_operator = excluded.by_operator;
    DELETE FROM holdfast_chats.mute AS q WHERE q.chat = in_chat AND q.user_id = plan ->> 'unmute';
END $$;

-- forget_contents_1: redact, erase and retain as planned, and record holes. The hash of a redacted text goes with it:
-- whoever guesses the text could prove it by that. An event says who is a member, and stays.
CREATE OR REPLACE FUNCTION holdfast_chats.forget_contents_1(in_chat bigint, plan jsonb) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF (plan ->> 'redact') IS NOT NULL THEN
        UPDATE holdfast_chats.message AS m SET content = '', content_hash = NULL
         WHERE m.chat = in_chat AND m.sequence = (plan ->> 'redact')::bigint;
    END IF;
    IF plan -> 'erase' IS NOT NULL THEN
        UPDATE holdfast_chats.message AS m SET content = '', content_hash = NULL
         WHERE m.chat = in_chat AND m.sender_id = plan -> 'erase' ->> 'user_id' AND m.kind = 'text'
           AND m.sequence = ANY (ARRAY (SELECT s::bigint FROM jsonb_array_elements_text(plan -> 'erase' -> 'sequences') AS s));
    END IF;
    IF (plan ->> 'retain')::boolean THEN
        DELETE FROM holdfast_chats.message AS m
         WHERE m.chat = in_chat AND m.sequence < (plan ->> 'first_sequence')::bigint;
    END IF;
    INSERT INTO holdfast_chats.gap (chat, first_sequence, last_sequence)
    SELECT in_chat, (g ->> 0)::bigint, (g ->> 1)::bigint FROM jsonb_array_elements(plan -> 'gaps') AS g
    ON CONFLICT DO NOTHING;
END $$;

-- take_positions_1: lock a shard to the commit and draw the next 512 positions of it.
CREATE OR REPLACE FUNCTION holdfast_chats.take_positions_1(of_shard smallint) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    positions regclass;
BEGIN
    SELECT s.positions INTO STRICT positions FROM holdfast_chats.shard AS s WHERE s.shard = of_shard FOR NO KEY UPDATE;
    RETURN nextval(positions);
END $$;

-- record_1: add to the audit log, and to the hash chain of the node (store/audit_chain.py). Its numbers are in commit
-- order: the lock is held to the commit.
CREATE OR REPLACE FUNCTION holdfast_chats.record_1(note jsonb) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    new holdfast_chats.audit := jsonb_populate_record(NULL::holdfast_chats.audit, note);
    previous text;
BEGIN
    IF note IS NULL THEN
        RETURN;
    END IF;
    PERFORM pg_advisory_xact_lock(7020094391842795521);
    new.number := coalesce((SELECT max(a.number) FROM holdfast_chats.audit AS a), 0) + 1;
    new.record_id := coalesce(new.record_id, '');  -- of an act of the database itself
    new.node := coalesce(new.node, '');
    previous := coalesce((SELECT a.hash FROM holdfast_chats.audit AS a WHERE a.node = new.node
                           ORDER BY a.node, a.number DESC LIMIT 1), '');
    new.hash := (SELECT encode(sha256(convert_to(string_agg(octet_length(t) || ':' || t, '' ORDER BY place), 'UTF8')),
                               'hex')
                   FROM unnest(ARRAY[previous, new.node, new.record_id, new.at, new.actor, new.action, new.target,
                                     new.reason, new.details]) WITH ORDINALITY AS u(t, place));
    INSERT INTO holdfast_chats.audit SELECT new.*;
END $$;

-- put_answer_1: keep a command's answer, with what only the commit knows. A key taken meanwhile is a unique_violation.
CREATE OR REPLACE FUNCTION holdfast_chats.put_answer_1(
    key jsonb, answer jsonb, epoch bigint, head bigint, created_at text
) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF key IS NULL THEN
        RETURN;
    END IF;
    answer := jsonb_set(jsonb_set(answer, '{chat,head}', to_jsonb(head)), '{chat,epoch}', to_jsonb(epoch));
    IF created_at IS NOT NULL THEN
        answer := jsonb_set(jsonb_set(answer, '{event,sequence}', to_jsonb(head)), '{event,created_at}', to_jsonb(created_at));
    END IF;
    INSERT INTO holdfast_chats.answer (tenant, user_id, key, fingerprint, answer, at)
    SELECT k.tenant, k.user_id, k.key, k.fingerprint, put_answer_1.answer::text, k.at
      FROM jsonb_populate_record(NULL::holdfast_chats.answer, put_answer_1.key) AS k;
END $$;
