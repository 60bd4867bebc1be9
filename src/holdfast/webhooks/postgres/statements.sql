-- name: head
SELECT server, version FROM holdfast_cluster.endpoint_head

-- name: version
SELECT version FROM holdfast_cluster.endpoint_head

-- name: change
-- Counts a change, and locks out others until the end of the transaction.
UPDATE holdfast_cluster.endpoint_head SET version = version + 1 RETURNING version

-- name: add
-- Messages have this server's time, and an endpoint gets those after its own: so it is not later than that.
INSERT INTO holdfast_cluster.endpoint VALUES ($1, $2, $3, $4, $5,
    least($6 COLLATE "C", to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')),
    $7, $8)

-- name: get
SELECT endpoint_id, tenant, url, secret, description, created_at, disabled, disabled_at
FROM holdfast_cluster.endpoint WHERE endpoint_id = $1

-- name: all
SELECT endpoint_id, tenant, url, secret, description, created_at, disabled, disabled_at
FROM holdfast_cluster.endpoint ORDER BY created_at, endpoint_id

-- name: disable
-- $1 endpoint, $2 why, $3 when
UPDATE holdfast_cluster.endpoint
SET disabled = $2, disabled_at = CASE WHEN disabled = '' THEN $3 ELSE disabled_at END
WHERE endpoint_id = $1 RETURNING endpoint_id

-- name: enable
UPDATE holdfast_cluster.endpoint SET disabled = '', disabled_at = '' WHERE endpoint_id = $1
RETURNING endpoint_id

-- name: remove
-- The endpoint, its deliveries, and the mark that it was here.
WITH gone AS (DELETE FROM holdfast_cluster.endpoint WHERE endpoint_id = $1 RETURNING endpoint_id),
     log AS (DELETE FROM holdfast_cluster.delivery USING gone WHERE delivery.endpoint_id = gone.endpoint_id)
INSERT INTO holdfast_cluster.removed_endpoint SELECT endpoint_id FROM gone RETURNING endpoint_id

-- name: removed
SELECT EXISTS (SELECT FROM holdfast_cluster.removed_endpoint WHERE endpoint_id = $1)

-- name: log
-- Logs a delivery and forgets the oldest of its endpoint. A statement does not see its own row, so one less is
-- passed over. Rows that another node forgets at the same time are left to it.
-- $1 … $9 the delivery, $10 how many are kept
WITH logged AS (
    INSERT INTO holdfast_cluster.delivery
        (endpoint_id, webhook_id, chat_id, sequence, attempt, at, status, seconds, error)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9))
DELETE FROM holdfast_cluster.delivery WHERE number IN (
    SELECT number FROM holdfast_cluster.delivery WHERE endpoint_id = $1 AND number <= (
        SELECT number FROM holdfast_cluster.delivery WHERE endpoint_id = $1
        ORDER BY number DESC LIMIT 1 OFFSET $10::bigint - 1)
    FOR UPDATE SKIP LOCKED)

-- name: deliveries
-- $1 endpoint, $2 limit
SELECT endpoint_id, webhook_id, chat_id, sequence, attempt, at, status, seconds, error
FROM holdfast_cluster.delivery WHERE endpoint_id = $1 ORDER BY number DESC LIMIT $2

-- name: last_seconds
SELECT endpoint_id, last.seconds FROM holdfast_cluster.endpoint CROSS JOIN LATERAL (
    SELECT seconds FROM holdfast_cluster.delivery WHERE delivery.endpoint_id = endpoint.endpoint_id
    ORDER BY number DESC LIMIT 1) AS last
