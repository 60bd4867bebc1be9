-- name: change
-- Counts a change, and locks out others until the end of the transaction.
UPDATE holdfast_cluster.revocation_head SET version = version + 1

-- name: give_number
UPDATE holdfast_cluster.revocation_head SET last_number = last_number + 1 RETURNING last_number

-- name: forget_ended
-- $1 now
DELETE FROM holdfast_cluster.revocation WHERE ends_at <= $1

-- name: by_key
-- $1 kind, $2 tenant, $3 user_id of the key, $4 item
SELECT kind, tenant, user_id, item, issued_before, made_at, ends_at, number FROM holdfast_cluster.revocation
WHERE kind = $1 AND tenant = $2 AND about = $3 AND item = $4

-- name: count
SELECT count(*) FROM holdfast_cluster.revocation

-- name: add
-- $1 … $8: an entry; $9 user_id of its key
INSERT INTO holdfast_cluster.revocation
    (kind, tenant, user_id, item, issued_before, made_at, ends_at, number, about)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)

-- name: replace
-- $1 number, $2 user_id, $3 issued_before, $4 made_at, $5 ends_at
UPDATE holdfast_cluster.revocation SET user_id = $2, issued_before = $3, made_at = $4, ends_at = $5
WHERE number = $1

-- name: remove
-- $1 number
DELETE FROM holdfast_cluster.revocation WHERE number = $1
RETURNING kind, tenant, user_id, item, issued_before, made_at, ends_at, number

-- name: all
-- $1 now
SELECT kind, tenant, user_id, item, issued_before, made_at, ends_at, number FROM holdfast_cluster.revocation
WHERE ends_at IS NULL OR ends_at > $1 ORDER BY number

-- name: version
SELECT version FROM holdfast_cluster.revocation_head
