-- Version 4: members who may not send, and users who may not be added to a chat.

ALTER TABLE members ADD COLUMN muted INTEGER NOT NULL DEFAULT 0 CHECK (muted IN (0, 1));

CREATE TABLE bans (
  chat      INTEGER NOT NULL,
  user_id   TEXT NOT NULL,
  banned_by TEXT NOT NULL,
  banned_at TEXT NOT NULL,
  PRIMARY KEY (chat, user_id)
) STRICT, WITHOUT ROWID;
