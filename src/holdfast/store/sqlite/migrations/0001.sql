-- Version 1: chats, their numbering, members, messages and records.
--
-- `chat` is a chat's number in this file, `send_key` 64 bits of BLAKE2b: they keep the indexes small, and with them
-- what a commit has to write. Two keys of one chat with one hash (one in 10^7 chats of a million messages) would have
-- the second send refused, never merged: a lookup compares the ids themselves. A message's `position` is its place in the
-- event log; AUTOINCREMENT never gives one twice, also after retention.

CREATE TABLE chats (
  chat           INTEGER PRIMARY KEY,
  chat_id        TEXT NOT NULL UNIQUE,
  tenant         TEXT NOT NULL,
  kind           TEXT NOT NULL CHECK (kind IN ('group', 'direct')),
  name           TEXT NOT NULL,
  pair           TEXT,                -- of a direct chat: its two users in order
  epoch          INTEGER NOT NULL,
  first_sequence INTEGER NOT NULL,
  halted         TEXT,                -- why it takes no messages
  members        INTEGER NOT NULL,
  created_by     TEXT NOT NULL,
  created_at     TEXT NOT NULL
) STRICT;

CREATE UNIQUE INDEX chats_by_pair ON chats (tenant, pair) WHERE pair IS NOT NULL;

CREATE TABLE counters (
  chat             INTEGER PRIMARY KEY,
  sequence_counter INTEGER NOT NULL CHECK (sequence_counter >= 0),  -- the last allocated sequence
  last_position    INTEGER NOT NULL                                 -- of the newest message, for lists of chats
) STRICT;

CREATE TRIGGER counters_are_never_deleted BEFORE DELETE ON counters
BEGIN SELECT RAISE(ABORT, 'a counter is never deleted'); END;

CREATE TRIGGER counters_never_go_back BEFORE UPDATE OF sequence_counter ON counters
WHEN NEW.sequence_counter < OLD.sequence_counter
BEGIN SELECT RAISE(ABORT, 'a counter never goes back'); END;

CREATE TABLE members (
  chat      INTEGER NOT NULL,
  user_id   TEXT NOT NULL,
  tenant    TEXT NOT NULL,
  role      TEXT NOT NULL CHECK (role IN ('owner', 'admin', 'member')),
  joined_at TEXT NOT NULL,
  PRIMARY KEY (chat, user_id)
) STRICT, WITHOUT ROWID;

CREATE INDEX members_by_user ON members (tenant, user_id, chat);

CREATE TABLE messages (
  position          INTEGER PRIMARY KEY AUTOINCREMENT,
  chat              INTEGER NOT NULL,
  sequence          INTEGER NOT NULL CHECK (sequence >= 1),
  kind              TEXT NOT NULL CHECK (kind IN ('text', 'event')),
  sender_id         TEXT NOT NULL,
  client_message_id TEXT,
  send_key          INTEGER,          -- a hash of sender_id and client_message_id; null for events
  content_hash      BLOB,
  message_id        TEXT NOT NULL,
  content           TEXT NOT NULL,
  content_type      TEXT NOT NULL,
  created_at        TEXT NOT NULL
) STRICT;

CREATE UNIQUE INDEX messages_by_sequence ON messages (chat, sequence);
CREATE UNIQUE INDEX messages_by_key ON messages (chat, send_key) WHERE send_key IS NOT NULL;

CREATE TABLE watermarks (
  chat      INTEGER NOT NULL,
  user_id   TEXT NOT NULL,
  device_id TEXT NOT NULL,
  epoch     INTEGER NOT NULL,
  delivered INTEGER NOT NULL,
  read      INTEGER NOT NULL,
  PRIMARY KEY (chat, user_id, device_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE gaps (
  chat           INTEGER NOT NULL,
  first_sequence INTEGER NOT NULL,
  last_sequence  INTEGER NOT NULL,
  PRIMARY KEY (chat, first_sequence, last_sequence)
) STRICT, WITHOUT ROWID;

CREATE TABLE answers (
  tenant      TEXT NOT NULL,
  user_id     TEXT NOT NULL,
  key         TEXT NOT NULL,
  fingerprint TEXT NOT NULL,
  answer      TEXT NOT NULL,
  PRIMARY KEY (tenant, user_id, key)
) STRICT, WITHOUT ROWID;

CREATE TABLE audit (
  number  INTEGER PRIMARY KEY AUTOINCREMENT,
  at      TEXT NOT NULL,
  actor   TEXT NOT NULL,
  action  TEXT NOT NULL,
  target  TEXT NOT NULL,
  reason  TEXT NOT NULL,
  details TEXT NOT NULL
) STRICT;

CREATE TRIGGER audit_is_never_changed BEFORE UPDATE ON audit
BEGIN SELECT RAISE(ABORT, 'the audit log is never changed'); END;

CREATE TRIGGER audit_is_never_deleted BEFORE DELETE ON audit
BEGIN SELECT RAISE(ABORT, 'the audit log is never deleted'); END;

-- A chat as holdfast.message.Chat.
CREATE VIEW chat_values AS
SELECT c.chat, c.chat_id, c.tenant, c.epoch,
       coalesce(k.sequence_counter, (SELECT max(m.sequence) FROM messages AS m WHERE m.chat = c.chat), 0) AS head,
       json_object(
         'chat_id', c.chat_id, 'tenant', c.tenant, 'kind', c.kind, 'name', c.name, 'epoch', c.epoch,
         'head', coalesce(k.sequence_counter, (SELECT max(m.sequence) FROM messages AS m WHERE m.chat = c.chat), 0),
         'first_sequence', c.first_sequence, 'halted', c.halted, 'created_by', c.created_by,
         'created_at', c.created_at) AS value
FROM chats AS c LEFT JOIN counters AS k ON k.chat = c.chat;

-- A message as holdfast.message.Message.
CREATE VIEW message_values AS
SELECT m.position, m.chat, m.sequence, c.tenant,
       json_object(
         'message_id', m.message_id, 'chat_id', c.chat_id, 'sequence', m.sequence, 'kind', m.kind,
         'sender_id', m.sender_id, 'client_message_id', m.client_message_id, 'content', m.content,
         'content_type', m.content_type, 'created_at', m.created_at) AS value
FROM messages AS m JOIN chats AS c ON c.chat = m.chat;
