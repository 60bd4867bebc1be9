-- The rules as they are, tombstones included; `body` is the rule as JSON.
CREATE TABLE rules (
    tenant   TEXT NOT NULL,
    resource TEXT NOT NULL,
    deleted  INTEGER NOT NULL,
    body     TEXT NOT NULL,
    PRIMARY KEY (tenant, resource)
) STRICT, WITHOUT ROWID;

-- Every change in commit order: the nodes' feed, the outbox and the history in one; `body` is the change as JSON.
CREATE TABLE rule_changes (
    seq      INTEGER PRIMARY KEY,
    tenant   TEXT NOT NULL,
    resource TEXT NOT NULL,
    version  INTEGER NOT NULL,
    body     TEXT NOT NULL
) STRICT;
CREATE INDEX rule_changes_by_rule ON rule_changes (tenant, resource, version);

-- Idempotency keys with the answer that was given; forgotten after a week.
CREATE TABLE rule_keys (
    key  TEXT PRIMARY KEY,
    at   REAL NOT NULL,
    body TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX rule_keys_by_age ON rule_keys (at);

-- Where the log stands. A restore raises the epoch: what was committed after the backup is lost, and its versions
-- may be given out again.
CREATE TABLE rules_head (
    one    INTEGER PRIMARY KEY CHECK (one = 1),
    epoch  INTEGER NOT NULL,
    seq    INTEGER NOT NULL,
    digest TEXT NOT NULL
) STRICT;
INSERT INTO rules_head VALUES (1, 1, 0, '00000000000000000000000000000000');
