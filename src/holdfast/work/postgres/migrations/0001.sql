-- The tables of work, schema version 1. State and action numbers are those of work/job.py.

CREATE SCHEMA holdfast_work;

CREATE TABLE holdfast_work.version (number integer NOT NULL);

-- Order is `seq`, never time. One by one (CACHE 1): the sweep relies on lower numbers having been drawn earlier.
CREATE SEQUENCE holdfast_work.job_seq CACHE 1;
CREATE SEQUENCE holdfast_work.instance_id CACHE 1;

-- One row per job that is not done. `xid` stands before `seq` because defaults are evaluated in column order: a row's
-- transaction has its id before the row has its number (work/postgres/sweep.py needs that).
-- `attempt` counts finished runs. `state`: 0 ready, 1 retry at due_at, 2 held behind its stream's head, 3 parked.
CREATE TABLE holdfast_work.job (
    xid         xid8        NOT NULL DEFAULT pg_current_xact_id(),
    seq         bigint      NOT NULL DEFAULT nextval('holdfast_work.job_seq') PRIMARY KEY,
    created_at  timestamptz NOT NULL DEFAULT now(),
    origin      bigint      NOT NULL DEFAULT 0,
    attempt     integer     NOT NULL DEFAULT 0,
    strikes     integer     NOT NULL DEFAULT 0,
    crashes     integer     NOT NULL DEFAULT 0,
    stages      integer     NOT NULL DEFAULT 1,
    partition   smallint    NOT NULL,
    state       smallint    NOT NULL DEFAULT 0,
    type        text        NOT NULL,
    destination text        NOT NULL DEFAULT '',
    payload     bytea       NOT NULL,
    stream      text,
    due_at      timestamptz,
    source      text,
    source_id   text,
    reason      smallint,
    error_type  text,
    error       text,
    trace       text,
    fingerprint text,
    failed_at   timestamptz
) WITH (
    autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 20000,
    autovacuum_vacuum_insert_threshold = -1, autovacuum_analyze_scale_factor = 0.5, autovacuum_analyze_threshold = 50000
);
CREATE INDEX job_ready ON holdfast_work.job (seq) WHERE state = 0;
CREATE INDEX job_xid ON holdfast_work.job (xid);
CREATE INDEX job_due ON holdfast_work.job (due_at) WHERE state = 1;
CREATE INDEX job_held ON holdfast_work.job (stream, seq) WHERE state = 2;

CREATE TABLE holdfast_work.dead (
    LIKE holdfast_work.job,
    dead_at timestamptz NOT NULL DEFAULT now()
);
ALTER TABLE holdfast_work.dead ADD PRIMARY KEY (seq);

-- A stream waits behind its failed head; what was released past it, by whom and why, is recorded here.
CREATE TABLE holdfast_work.block (
    head             bigint      PRIMARY KEY,
    stream           text        NOT NULL,
    partition        smallint    NOT NULL,
    policy           smallint    NOT NULL,
    since            timestamptz NOT NULL DEFAULT now(),
    released_through bigint      NOT NULL DEFAULT 0,
    released_ids     bigint[]    NOT NULL DEFAULT '{}',
    released_types   text[]      NOT NULL DEFAULT '{}',
    by               text        NOT NULL DEFAULT '',
    why              text        NOT NULL DEFAULT ''
);
CREATE INDEX block_stream ON holdfast_work.block (stream);

-- One row per living worker: heartbeat, fence and record of what is in flight. An id is never used again, so a worker
-- whose row is gone has lost its lease. Updated at every call, hence the free space for HOT updates.
CREATE TABLE holdfast_work.instance (
    id        bigint      PRIMARY KEY DEFAULT nextval('holdfast_work.instance_id'),
    name      text        NOT NULL,
    joined_at timestamptz NOT NULL DEFAULT now(),
    beat_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    sleeping  boolean     NOT NULL DEFAULT false,
    notice    boolean     NOT NULL DEFAULT false,
    running   bigint[]    NOT NULL DEFAULT '{}'
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);

-- `epoch` rises with every new owner: the fence that handlers are shown.
CREATE TABLE holdfast_work.partition (
    id    smallint PRIMARY KEY,
    owner bigint,
    epoch bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 20);
INSERT INTO holdfast_work.partition (id) SELECT generate_series(0, 255);

-- What the inbox has stored before. Not partitioned by day: a duplicate may come on the next day.
CREATE TABLE holdfast_work.seen (
    source  text        NOT NULL,
    id      text        NOT NULL,
    seen_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (source, id)
);
CREATE INDEX seen_at ON holdfast_work.seen (seen_at);

CREATE TABLE holdfast_work.breaker (
    type       text        PRIMARY KEY,
    open_until timestamptz NOT NULL,
    by         text        NOT NULL
);

-- How far named readers of other logs have come; written in the transaction that stores their jobs.
CREATE TABLE holdfast_work.reader (
    name     text   PRIMARY KEY,
    position bigint NOT NULL
);

-- The Holdfast server whose jobs these are, if they are a server's; at most one, for its endpoints are its own.
CREATE TABLE holdfast_work.server (
    one  boolean PRIMARY KEY DEFAULT true CHECK (one),
    name text    NOT NULL
);

CREATE TABLE holdfast_work.act (
    number bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at     timestamptz NOT NULL DEFAULT now(),
    verb   text        NOT NULL,
    target text        NOT NULL,
    count  integer     NOT NULL,
    by     text        NOT NULL,
    why    text        NOT NULL
);

INSERT INTO holdfast_work.version VALUES (1);
