-- name: put
-- No row if another node has put it. $1 shard, $2 offset, $3 reason, $4 message, $5 data, $6 when
INSERT INTO holdfast_cluster.dead_letter (shard, log_offset, reason, message, data, at)
VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT DO NOTHING RETURNING number

-- name: trim
-- $1 how many are kept
DELETE FROM holdfast_cluster.dead_letter WHERE number <= (
    SELECT number FROM holdfast_cluster.dead_letter ORDER BY number DESC LIMIT 1 OFFSET $1)

-- name: count
SELECT count(*) FROM holdfast_cluster.dead_letter

-- name: read
-- $1 limit
SELECT shard, log_offset, reason, message, data, at FROM holdfast_cluster.dead_letter
ORDER BY number DESC LIMIT $1
