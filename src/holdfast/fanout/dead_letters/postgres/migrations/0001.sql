-- Events that no node could use. Every node reads every event: the first that fails at one puts it here, the
-- others find it.
CREATE TABLE holdfast_cluster.dead_letter (
    number    bigint  GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    shard     integer NOT NULL,
    log_offset bigint NOT NULL,
    reason    text    NOT NULL,
    message   text    NOT NULL,
    data      bytea   NOT NULL,
    at        text    NOT NULL,
    UNIQUE (shard, log_offset, reason)
);
