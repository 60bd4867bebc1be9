-- The endpoints of webhooks and the log of deliveries, one SQLite file.
CREATE TABLE endpoint (
    endpoint_id TEXT PRIMARY KEY,
    tenant      TEXT NOT NULL,
    url         TEXT NOT NULL,
    secret      TEXT NOT NULL,
    description TEXT NOT NULL,
    created_at  TEXT NOT NULL,
    disabled    TEXT NOT NULL
) STRICT;

CREATE TABLE delivery (
    number      INTEGER PRIMARY KEY AUTOINCREMENT,
    endpoint_id TEXT    NOT NULL,
    webhook_id  TEXT    NOT NULL,
    chat_id     TEXT    NOT NULL,
    sequence    INTEGER NOT NULL,
    attempt     INTEGER NOT NULL,
    at          TEXT    NOT NULL,
    status      INTEGER NOT NULL,
    seconds     REAL    NOT NULL,
    error       TEXT    NOT NULL
) STRICT;
CREATE INDEX delivery_endpoint ON delivery (endpoint_id, number);
