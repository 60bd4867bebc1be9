-- The rules as they are, tombstones included.
CREATE TABLE holdfast_rules (
    tenant   text COLLATE "C" NOT NULL,
    resource text COLLATE "C" NOT NULL,
    deleted  boolean NOT NULL,
    body     text NOT NULL,
    PRIMARY KEY (tenant, resource)
);

-- Every change in commit order: the nodes' feed, the outbox and the history in one.
CREATE TABLE holdfast_rule_changes (
    seq      bigint PRIMARY KEY,
    tenant   text COLLATE "C" NOT NULL,
    resource text COLLATE "C" NOT NULL,
    version  bigint NOT NULL,
    body     text NOT NULL
);
CREATE INDEX holdfast_rule_changes_by_rule ON holdfast_rule_changes (tenant, resource, seq);

-- Idempotency keys with the answer that was given; forgotten after a week.
CREATE TABLE holdfast_rule_keys (
    key  text PRIMARY KEY,
    at   timestamptz NOT NULL,
    body text NOT NULL
);
CREATE INDEX holdfast_rule_keys_by_age ON holdfast_rule_keys (at);

-- Where the log stands, of which life of the primary (its timeline), and when that was last said.
CREATE TABLE holdfast_rules_head (
    one     boolean PRIMARY KEY CHECK (one),
    epoch   bigint NOT NULL,
    seq     bigint NOT NULL,
    digest  text NOT NULL,
    beat_at timestamptz NOT NULL
);
INSERT INTO holdfast_rules_head VALUES (true, 1, 0, '00000000000000000000000000000000', now());
