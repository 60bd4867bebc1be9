-- Version 1: chats, their numbering, members, messages, the log's events and the records.
--
-- `chat` is a chat's number in this database, `send_key` 64 bits of BLAKE2b: they keep the indexes small. Two keys of
-- one chat with one hash would have the second send refused, never merged: a lookup compares the ids themselves.
--
-- A `position` is a place in a shard of the log. It is drawn while the shard's row is locked, and the lock is held to
-- the commit: so position order is commit order, and no reader steps over a late commit. Positions rise and have holes.
--
-- Epochs are stored without `cluster.epoch_base`, which is added when they are read: one update raises all of them, and
-- watermarks stay valid.

CREATE SCHEMA holdfast_chats;

CREATE TABLE holdfast_chats.cluster (
    one          boolean PRIMARY KEY DEFAULT true CHECK (one),
    system       text NOT NULL,             -- the server's system identifier,
    timeline     bigint NOT NULL,           -- and the timeline of the WAL it writes: who this database was last seen on
    epoch_base   bigint NOT NULL DEFAULT 0,
    shards       smallint NOT NULL CHECK (shards BETWEEN 1 AND 256)
);

CREATE TABLE holdfast_chats.shard (
    shard          smallint PRIMARY KEY,
    positions      regclass NOT NULL,       -- the sequence its positions are drawn from
    first_position bigint NOT NULL DEFAULT 0 -- events before it are deleted
);

CREATE TABLE holdfast_chats.chat (
    chat           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    shard          smallint NOT NULL,
    epoch          bigint NOT NULL,
    counter        bigint CHECK (counter >= 0),  -- the last allocated sequence; null: lost
    version        bigint NOT NULL DEFAULT 0,    -- moves with every change but a send
    active_at      timestamptz NOT NULL,         -- of the newest message, or of the creation
    first_sequence bigint NOT NULL,
    members        integer NOT NULL,
    chat_id        text COLLATE "C" NOT NULL,
    tenant         text COLLATE "C" NOT NULL,
    kind           text NOT NULL CHECK (kind IN ('group', 'direct')),
    name           text NOT NULL,
    pair           text COLLATE "C",             -- of a direct chat: its two users in order
    halted         text,                         -- why it takes no messages
    created_by     text NOT NULL,
    created_at     text NOT NULL
) WITH (fillfactor = 70);  -- and no index on what a send changes: its update stays on the page

CREATE UNIQUE INDEX chat_by_id ON holdfast_chats.chat (chat_id);
CREATE UNIQUE INDEX chat_by_pair ON holdfast_chats.chat (tenant, pair) WHERE pair IS NOT NULL;

CREATE FUNCTION holdfast_chats.keep_counter() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' THEN
        RAISE EXCEPTION 'a counter never goes back' USING ERRCODE = 'check_violation';
    END IF;
    RAISE EXCEPTION 'a counter is never deleted' USING ERRCODE = 'check_violation';
END $$;

CREATE TRIGGER counter_never_goes_back BEFORE UPDATE ON holdfast_chats.chat FOR EACH ROW
    WHEN (OLD.counter IS NOT NULL AND (NEW.counter IS NULL OR NEW.counter < OLD.counter))
    EXECUTE FUNCTION holdfast_chats.keep_counter();
CREATE TRIGGER counter_is_never_deleted BEFORE DELETE ON holdfast_chats.chat FOR EACH ROW
    EXECUTE FUNCTION holdfast_chats.keep_counter();
CREATE TRIGGER counters_are_never_deleted BEFORE TRUNCATE ON holdfast_chats.chat
    EXECUTE FUNCTION holdfast_chats.keep_counter();

CREATE TABLE holdfast_chats.member (
    chat      bigint NOT NULL,
    user_id   text COLLATE "C" NOT NULL,
    tenant    text COLLATE "C" NOT NULL,
    role      text NOT NULL CHECK (role IN ('owner', 'admin', 'member')),
    joined_at text NOT NULL,
    invited   boolean NOT NULL,              -- by another user's token
    PRIMARY KEY (chat, user_id)
);
CREATE INDEX member_by_user ON holdfast_chats.member (tenant, user_id, chat);

CREATE TABLE holdfast_chats.ban (
    chat        bigint NOT NULL,
    user_id     text COLLATE "C" NOT NULL,
    banned_by   text NOT NULL,
    banned_at   text NOT NULL,
    by_operator boolean NOT NULL,
    PRIMARY KEY (chat, user_id)
);

CREATE TABLE holdfast_chats.mute (
    chat        bigint NOT NULL,
    user_id     text COLLATE "C" NOT NULL,
    by_operator boolean NOT NULL,
    PRIMARY KEY (chat, user_id)
);

CREATE TABLE holdfast_chats.message (
    chat              bigint NOT NULL,
    sequence          bigint NOT NULL CHECK (sequence >= 1),
    position          bigint NOT NULL,
    send_key          bigint,                -- a hash of sender_id and client_message_id; null for events
    created_at        timestamptz NOT NULL,
    shard             smallint NOT NULL,
    kind              text NOT NULL CHECK (kind IN ('text', 'event')),
    sender_id         text COLLATE "C" NOT NULL,
    client_message_id text COLLATE "C",
    content_hash      bytea,
    message_id        text NOT NULL,
    content           text NOT NULL,
    content_type      text NOT NULL,
    PRIMARY KEY (chat, sequence)
);
CREATE UNIQUE INDEX message_by_key ON holdfast_chats.message (chat, send_key) WHERE send_key IS NOT NULL;
CREATE UNIQUE INDEX message_by_position ON holdfast_chats.message (shard, position);

-- What is in the log and has no sequence. `numbers` are of the kind: EpochRaised [head], AllEpochsRaised [base].
CREATE TABLE holdfast_chats.log_event (
    shard    smallint NOT NULL,
    position bigint NOT NULL,
    kind     text NOT NULL,
    chat     bigint,
    epoch    bigint NOT NULL,
    users    text[] NOT NULL DEFAULT '{}',
    numbers  bigint[] NOT NULL DEFAULT '{}',
    at       timestamptz NOT NULL,
    PRIMARY KEY (shard, position)
);

CREATE TABLE holdfast_chats.watermark (
    chat      bigint NOT NULL,
    user_id   text COLLATE "C" NOT NULL,
    device_id text COLLATE "C" NOT NULL,
    epoch     bigint NOT NULL,
    delivered bigint NOT NULL,
    read      bigint NOT NULL,
    PRIMARY KEY (chat, user_id, device_id)
) WITH (fillfactor = 70);

CREATE TABLE holdfast_chats.gap (
    chat           bigint NOT NULL,
    first_sequence bigint NOT NULL,
    last_sequence  bigint NOT NULL,
    PRIMARY KEY (chat, first_sequence, last_sequence)
);

CREATE TABLE holdfast_chats.answer (
    tenant      text COLLATE "C" NOT NULL,
    user_id     text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    fingerprint text NOT NULL,
    answer      text NOT NULL,
    at          text COLLATE "C" NOT NULL,
    node        text,                  -- while a request runs: where, and until when at most
    until       timestamptz,
    PRIMARY KEY (tenant, user_id, key)
);
CREATE INDEX answer_by_age ON holdfast_chats.answer (at);

CREATE TABLE holdfast_chats.audit (
    number    bigint PRIMARY KEY,
    at        text NOT NULL,
    actor     text NOT NULL,
    action    text NOT NULL,
    target    text NOT NULL,
    reason    text NOT NULL,
    details   text NOT NULL,
    record_id text NOT NULL,
    node      text NOT NULL,
    hash      text NOT NULL          -- see store/audit_chain.py
);
CREATE INDEX audit_by_node ON holdfast_chats.audit (node, number);

CREATE FUNCTION holdfast_chats.keep_audit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'the audit log is never changed' USING ERRCODE = 'check_violation';
END $$;
CREATE TRIGGER audit_is_never_changed BEFORE UPDATE OR DELETE ON holdfast_chats.audit FOR EACH ROW
    EXECUTE FUNCTION holdfast_chats.keep_audit();
CREATE TRIGGER audit_is_never_truncated BEFORE TRUNCATE ON holdfast_chats.audit
    EXECUTE FUNCTION holdfast_chats.keep_audit();

-- Up to which position of each shard messages have lost their keys.
CREATE TABLE holdfast_chats.keys_forgotten (
    shard   smallint PRIMARY KEY,
    through bigint NOT NULL DEFAULT 0
);

-- What a write that changes nothing writes.
CREATE TABLE holdfast_chats.touched (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
INSERT INTO holdfast_chats.touched DEFAULT VALUES;

-- Who may do what only one node does at a time; see store/leases/. A fence is (cluster.epoch_base, number).
CREATE TABLE holdfast_chats.lease (
    name       text PRIMARY KEY,
    holder     text NOT NULL,
    number     bigint NOT NULL,
    expires_at timestamptz NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE holdfast_chats.schema_version (
    version integer NOT NULL
);

-- text_of_time: a time as every record has it.
CREATE FUNCTION holdfast_chats.text_of_time(at timestamptz) RETURNS text LANGUAGE sql STABLE
AS $$ SELECT to_char(at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') $$;

-- A chat as holdfast.message.Chat.
CREATE VIEW holdfast_chats.chat_value AS
SELECT c.chat, c.chat_id, c.tenant, b.epoch, b.head,
       json_build_object(
         'chat_id', c.chat_id, 'tenant', c.tenant, 'kind', c.kind, 'name', c.name, 'epoch', b.epoch, 'head', b.head,
         'first_sequence', c.first_sequence, 'halted', c.halted, 'created_by', c.created_by,
         'created_at', c.created_at) AS value
  FROM holdfast_chats.chat AS c
 CROSS JOIN LATERAL (
    SELECT c.epoch + (SELECT epoch_base FROM holdfast_chats.cluster) AS epoch,
           coalesce(c.counter, (SELECT max(m.sequence) FROM holdfast_chats.message AS m WHERE m.chat = c.chat), 0) AS head
    OFFSET 0) AS b;

-- A message as holdfast.message.Message.
CREATE VIEW holdfast_chats.message_value AS
SELECT m.chat, m.sequence,
       json_build_object(
         'message_id', m.message_id, 'chat_id', c.chat_id, 'sequence', m.sequence, 'kind', m.kind,
         'sender_id', m.sender_id, 'client_message_id', m.client_message_id, 'content', m.content,
         'content_type', m.content_type, 'created_at', holdfast_chats.text_of_time(m.created_at)) AS value
  FROM holdfast_chats.message AS m JOIN holdfast_chats.chat AS c ON c.chat = m.chat;

CREATE VIEW holdfast_chats.member_value AS
SELECT m.chat, m.user_id,
       json_build_object('user_id', m.user_id, 'role', m.role, 'joined_at', m.joined_at,
                         'muted', q.chat IS NOT NULL, 'muted_by_operator', coalesce(q.by_operator, false)) AS value
  FROM holdfast_chats.member AS m
  LEFT JOIN holdfast_chats.mute AS q ON q.chat = m.chat AND q.user_id = m.user_id;

-- The stored sequences of a chat: the highest, how many, and a row for each range that is missing between the first
-- that is kept and the last that was given; one row without a range if none is.
CREATE VIEW holdfast_chats.numbering AS
SELECT c.chat, n.highest, n.stored, g.first, g.last
  FROM holdfast_chats.chat AS c
 CROSS JOIN LATERAL (
    SELECT coalesce(max(m.sequence), 0) AS highest, count(*) AS stored
      FROM holdfast_chats.message AS m WHERE m.chat = c.chat) AS n
  LEFT JOIN LATERAL (
    SELECT s.before + 1 AS first, s.sequence - 1 AS last
      FROM (SELECT u.sequence, lag(u.sequence, 1, c.first_sequence - 1) OVER (ORDER BY u.sequence) AS before
              FROM (SELECT m.sequence FROM holdfast_chats.message AS m
                     WHERE m.chat = c.chat AND m.sequence >= c.first_sequence
                    UNION ALL
                    SELECT greatest(n.highest, c.counter, c.first_sequence - 1) + 1) AS u) AS s
     WHERE s.sequence > s.before + 1) AS g ON true;
