-- name: load
-- The keys, or null if the version is $1.
SELECT version, CASE WHEN version = $1 THEN NULL ELSE keys END FROM holdfast_cluster.credentials

-- name: lock
-- Until the end of the transaction: starts and changes of keys are one after the other.
SELECT version, keys FROM holdfast_cluster.credentials FOR UPDATE

-- name: save
-- $1 the version to replace, $2 the new version, $3 the new keys
UPDATE holdfast_cluster.credentials SET version = $2, keys = $3 WHERE version = $1 RETURNING version

-- name: fingerprints
SELECT fingerprint FROM holdfast_cluster.token_key

-- name: forget_fingerprints
-- Those that are not among $1.
DELETE FROM holdfast_cluster.token_key WHERE fingerprint <> ALL ($1::text[])

-- name: put_fingerprints
INSERT INTO holdfast_cluster.token_key (fingerprint) SELECT unnest($1::text[]) ON CONFLICT DO NOTHING
