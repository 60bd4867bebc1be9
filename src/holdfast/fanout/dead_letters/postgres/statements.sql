-- name: put
-- No row if another node has put it. $1 shard, $2 offset, $3 reason, $4 message, $5 data, $6 when, $7 tenant, $8 chat
INSERT INTO holdfast_cluster.dead_letter (shard, log_offset, reason, message, data, at, tenant, chat_id)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT DO NOTHING RETURNING number

-- name: trim
-- $1 how many are kept
DELETE FROM holdfast_cluster.dead_letter WHERE number <= (
    SELECT number FROM holdfast_cluster.dead_letter ORDER BY number DESC LIMIT 1 OFFSET $1)

-- name: count
SELECT count(*) FROM holdfast_cluster.dead_letter

-- name: counts
SELECT reason, count(*) FROM holdfast_cluster.dead_letter GROUP BY reason

-- name: read
-- $1 limit, $2 below which number
SELECT shard, log_offset, reason, message, data, at, tenant, chat_id, number FROM holdfast_cluster.dead_letter
WHERE number < $2 ORDER BY number DESC LIMIT $1

-- name: get
-- $1 number
SELECT shard, log_offset, reason, message, data, at, tenant, chat_id, number FROM holdfast_cluster.dead_letter
WHERE number = $1

-- name: remove
-- $1 numbers
WITH removed AS (DELETE FROM holdfast_cluster.dead_letter WHERE number = ANY ($1::bigint[]) RETURNING number)
SELECT count(*) FROM removed

-- name: forget_user
-- $1 the id as bytes
UPDATE holdfast_cluster.dead_letter SET data = '' WHERE position($1::bytea IN data) > 0
