-- The tables of work in one SQLite file, for one process. State and action numbers are those of work/job.py.
-- Times are seconds since the epoch. Sequences are never used again (AUTOINCREMENT).

CREATE TABLE job (
    seq         INTEGER PRIMARY KEY AUTOINCREMENT,
    type        TEXT    NOT NULL,
    payload     BLOB    NOT NULL,
    stream      TEXT,
    destination TEXT    NOT NULL,
    state       INTEGER NOT NULL,
    attempt     INTEGER NOT NULL DEFAULT 0,
    strikes     INTEGER NOT NULL DEFAULT 0,
    crashes     INTEGER NOT NULL DEFAULT 0,
    stages      INTEGER NOT NULL DEFAULT 1,
    origin      INTEGER NOT NULL DEFAULT 0,
    created_at  REAL    NOT NULL,
    due_at      REAL,
    source      TEXT,
    source_id   TEXT,
    reason      INTEGER,
    error_type  TEXT,
    error       TEXT,
    trace       TEXT,
    fingerprint TEXT
) STRICT;
CREATE INDEX job_due ON job (due_at) WHERE state = 1;
CREATE INDEX job_held ON job (stream, seq) WHERE state = 2;

CREATE TABLE dead (
    seq INTEGER PRIMARY KEY, type TEXT NOT NULL, payload BLOB NOT NULL, stream TEXT, destination TEXT NOT NULL,
    state INTEGER NOT NULL, attempt INTEGER NOT NULL, strikes INTEGER NOT NULL, crashes INTEGER NOT NULL,
    stages INTEGER NOT NULL, origin INTEGER NOT NULL, created_at REAL NOT NULL, due_at REAL, source TEXT,
    source_id TEXT, reason INTEGER, error_type TEXT, error TEXT, trace TEXT, fingerprint TEXT, dead_at REAL NOT NULL
) STRICT;

-- A stream waits behind its failed head; released_ids and released_types are JSON arrays.
CREATE TABLE block (
    head             INTEGER PRIMARY KEY,
    stream           TEXT    NOT NULL,
    policy           INTEGER NOT NULL,
    since            REAL    NOT NULL,
    released_through INTEGER NOT NULL DEFAULT 0,
    released_ids     TEXT    NOT NULL DEFAULT '[]',
    released_types   TEXT    NOT NULL DEFAULT '[]',
    by               TEXT    NOT NULL DEFAULT '',
    why              TEXT    NOT NULL DEFAULT ''
) STRICT;
CREATE INDEX block_stream ON block (stream);

-- The one worker: its number is its fence, `running` (JSON) what is in flight. At most one row.
CREATE TABLE seat (
    id      INTEGER PRIMARY KEY AUTOINCREMENT,
    name    TEXT    NOT NULL,
    notice  INTEGER NOT NULL DEFAULT 0,
    running TEXT    NOT NULL DEFAULT '[]'
) STRICT;

CREATE TABLE seen (
    source TEXT NOT NULL, id TEXT NOT NULL, seen_at REAL NOT NULL, PRIMARY KEY (source, id)
) STRICT, WITHOUT ROWID;
CREATE INDEX seen_at ON seen (seen_at);

CREATE TABLE breaker (type TEXT PRIMARY KEY, open_until REAL NOT NULL, by TEXT NOT NULL) STRICT;

CREATE TABLE reader (name TEXT PRIMARY KEY, position INTEGER NOT NULL) STRICT;

CREATE TABLE act (
    number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, verb TEXT NOT NULL, target TEXT NOT NULL,
    count INTEGER NOT NULL, by TEXT NOT NULL, why TEXT NOT NULL
) STRICT;

-- The seed's tables as read-only views; `status` carries the Failed bit (32768) where the last run failed.
CREATE VIEW wh_work AS
SELECT CAST(seq AS TEXT) AS message_id, stream AS stream_id, destination, type AS event_type,
       CAST(payload AS TEXT) AS event_data,
       stages | CASE WHEN state IN (1, 3) AND reason IS NOT NULL THEN 32768 ELSE 0 END AS status,
       attempt AS attempts, error, reason AS failure_reason, CASE WHEN state = 1 THEN due_at END AS scheduled_for,
       (SELECT name FROM seat WHERE EXISTS (SELECT 1 FROM json_each(running) WHERE value = seq)) AS instance_id,
       NULL AS lease_expiry, created_at, source, source_id
  FROM job;
CREATE VIEW wh_outbox AS SELECT * FROM wh_work WHERE source IS NULL;
CREATE VIEW wh_inbox AS SELECT * FROM wh_work WHERE source IS NOT NULL;
