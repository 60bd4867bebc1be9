-- Version 2: the tokens of a whole tenant are revoked, too. Numbers go on where they were.

CREATE TABLE revocations_2 (
  number        INTEGER PRIMARY KEY AUTOINCREMENT,
  kind          TEXT NOT NULL CHECK (kind IN ('token', 'user', 'device', 'ban', 'mute', 'tenant')),
  tenant        TEXT NOT NULL,
  about         TEXT NOT NULL,        -- user_id, but '' of a token: with item, what there is one entry of
  user_id       TEXT NOT NULL,
  item          TEXT NOT NULL,        -- a token's id, or a device's
  issued_before REAL NOT NULL,
  made_at       TEXT NOT NULL,
  ends_at       REAL                  -- seconds since the epoch; null: it must be lifted
) STRICT;

INSERT INTO revocations_2 SELECT * FROM revocations;
DELETE FROM sqlite_sequence WHERE name = 'revocations_2';
INSERT INTO sqlite_sequence (name, seq) SELECT 'revocations_2', seq FROM sqlite_sequence WHERE name = 'revocations';
DROP TABLE revocations;
ALTER TABLE revocations_2 RENAME TO revocations;

CREATE UNIQUE INDEX revocations_by_key ON revocations (kind, tenant, about, item);
CREATE INDEX revocations_by_end ON revocations (ends_at) WHERE ends_at IS NOT NULL;
