-- Version 1: revoked tokens, users and devices; users banned or muted in a tenant.

CREATE TABLE revocations (
  number        INTEGER PRIMARY KEY AUTOINCREMENT,
  kind          TEXT NOT NULL CHECK (kind IN ('token', 'user', 'device', 'ban', 'mute')),
  tenant        TEXT NOT NULL,
  about         TEXT NOT NULL,        -- user_id, but '' of a token: with item, what there is one entry of
  user_id       TEXT NOT NULL,
  item          TEXT NOT NULL,        -- a token's id, or a device's
  issued_before REAL NOT NULL,
  made_at       TEXT NOT NULL,
  ends_at       REAL                  -- seconds since the epoch; null: it must be lifted
) STRICT;

CREATE UNIQUE INDEX revocations_by_key ON revocations (kind, tenant, about, item);
CREATE INDEX revocations_by_end ON revocations (ends_at) WHERE ends_at IS NOT NULL;

-- Rises with every change, so that others know when to read all of it again.
CREATE TABLE version (
  one   INTEGER PRIMARY KEY CHECK (one = 1),
  value INTEGER NOT NULL
) STRICT;
INSERT INTO version VALUES (1, 0);
