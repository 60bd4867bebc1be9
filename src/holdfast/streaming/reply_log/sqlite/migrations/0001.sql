-- Replies that can be resumed, claims of Idempotency-Keys, and usage.

-- One row for each reply. ended: 0 not yet, 1 done, 2 error.
CREATE TABLE log (
    log_id       INTEGER PRIMARY KEY,
    reply_id     TEXT    NOT NULL UNIQUE,
    owner_tenant TEXT    NOT NULL,
    owner_kind   TEXT    NOT NULL,
    owner_name   TEXT    NOT NULL,
    kind         TEXT    NOT NULL,
    epoch        INTEGER NOT NULL,
    last_n       INTEGER NOT NULL,
    ended        INTEGER NOT NULL,
    expires_at   REAL    NOT NULL
) STRICT;
CREATE INDEX log_owner ON log (owner_tenant, owner_kind, owner_name);
CREATE INDEX log_expiry ON log (expires_at);
CREATE INDEX log_unfinished ON log (log_id) WHERE ended = 0;

-- The entries as ``entry_codec`` stores them.
CREATE TABLE entry (
    log_id INTEGER NOT NULL,
    epoch  INTEGER NOT NULL,
    n      INTEGER NOT NULL,
    stored BLOB    NOT NULL,
    PRIMARY KEY (log_id, epoch, n)
) STRICT, WITHOUT ROWID;

CREATE TABLE claim (
    owner_tenant TEXT NOT NULL,
    owner_kind   TEXT NOT NULL,
    owner_name   TEXT NOT NULL,
    key          TEXT NOT NULL,
    body_hash    BLOB NOT NULL,
    reply_id     TEXT NOT NULL,
    node         TEXT NOT NULL,
    expires_at   REAL NOT NULL,
    PRIMARY KEY (owner_tenant, owner_kind, owner_name, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX claim_reply ON claim (reply_id);
CREATE INDEX claim_expiry ON claim (expires_at);

CREATE TABLE usage (
    day               TEXT    NOT NULL,
    tenant            TEXT    NOT NULL,
    user              TEXT    NOT NULL,
    model             TEXT    NOT NULL,
    provider          TEXT    NOT NULL,
    replies           INTEGER NOT NULL,
    prompt_tokens     INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    estimated         INTEGER NOT NULL,
    PRIMARY KEY (day, tenant, user, model, provider)
) STRICT, WITHOUT ROWID;

-- Runs that were noted while they ran or have counted lately. counted_at: NULL while a run goes on.
CREATE TABLE run (
    run_id            TEXT    PRIMARY KEY,
    day               TEXT    NOT NULL,
    tenant            TEXT    NOT NULL,
    user              TEXT    NOT NULL,
    model             TEXT    NOT NULL,
    provider          TEXT    NOT NULL,
    prompt_tokens     INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    estimated         INTEGER NOT NULL,
    counted_at        REAL
) STRICT, WITHOUT ROWID;
CREATE INDEX run_counted ON run (counted_at);
