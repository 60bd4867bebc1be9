-- Who is cut off. `about` is user_id, but '' of a token: with item, what there is one entry of. `item` is a
-- token's id, or a device's. `ends_at` in seconds since the epoch; null: it must be lifted.
CREATE TABLE holdfast_cluster.revocation (
    number        bigint           PRIMARY KEY,
    kind          text COLLATE "C" NOT NULL,
    tenant        text COLLATE "C" NOT NULL,
    about         text COLLATE "C" NOT NULL,
    user_id       text COLLATE "C" NOT NULL,
    item          text COLLATE "C" NOT NULL,
    issued_before float8           NOT NULL,
    made_at       text COLLATE "C" NOT NULL,
    ends_at       float8,
    UNIQUE (kind, tenant, about, item)
);
CREATE INDEX revocation_by_end ON holdfast_cluster.revocation (ends_at) WHERE ends_at IS NOT NULL;

-- The version rises with every change, so that nodes know when to read all of it again. The row is locked by
-- every change, so a version is visible only with all its entries.
CREATE TABLE holdfast_cluster.revocation_head (
    one         boolean PRIMARY KEY DEFAULT true CHECK (one),
    version     bigint  NOT NULL,
    last_number bigint  NOT NULL
);
INSERT INTO holdfast_cluster.revocation_head VALUES (true, 0, 0);
