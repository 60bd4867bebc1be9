-- Version 8: the log also says when a chat was created and when its epoch was raised. Such an entry has no sequence; its
-- position is one of those that messages have, so there is one order of both.

CREATE TABLE log_events (
  position INTEGER PRIMARY KEY,
  chat     INTEGER NOT NULL,
  epoch    INTEGER NOT NULL,         -- the chat's in this commit
  kind     TEXT NOT NULL,            -- the name of the value in holdfast.message
  content  TEXT NOT NULL             -- its fields, JSON
) STRICT;

-- The counter of positions must exist for the first log event to move it.
INSERT INTO sqlite_sequence (name, seq)
SELECT 'messages', 0 WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'messages');

-- An entry of the log [position, tenant, chat_id, epoch, kind, value]; the kind of a message is null.
CREATE VIEW log_values AS
SELECT v.position, json_array(v.position, v.tenant, c.chat_id, c.epoch, NULL, json(v.value)) AS value
FROM message_values AS v CROSS JOIN chats AS c ON c.chat = v.chat
UNION ALL
SELECT e.position, json_array(e.position, c.tenant, c.chat_id, e.epoch, e.kind, json(e.content))
FROM log_events AS e CROSS JOIN chats AS c ON c.chat = e.chat;
