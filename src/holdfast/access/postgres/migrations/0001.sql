-- All API keys of the cluster: a JSON array of key files' form, only hashes of secrets. The version is a digest
-- of it; '' until the first node has started.
CREATE TABLE holdfast_cluster.credentials (
    one     boolean PRIMARY KEY DEFAULT true CHECK (one),
    version text    NOT NULL,
    keys    text    NOT NULL
);
INSERT INTO holdfast_cluster.credentials VALUES (true, '', '[]');

-- Fingerprints of the token keys that the node had which started last.
CREATE TABLE holdfast_cluster.token_key (
    fingerprint text        PRIMARY KEY,
    stored_at   timestamptz NOT NULL DEFAULT now()
);
