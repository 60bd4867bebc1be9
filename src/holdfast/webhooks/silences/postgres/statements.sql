-- name: read
SELECT alert, until, reason, made_by FROM holdfast_cluster.silence ORDER BY alert

-- name: put
-- $1 alert, $2 until, $3 reason, $4 by whom
INSERT INTO holdfast_cluster.silence (alert, until, reason, made_by) VALUES ($1, $2, $3, $4)
ON CONFLICT (alert) DO UPDATE SET until = excluded.until, reason = excluded.reason, made_by = excluded.made_by

-- name: remove
-- $1 alert
DELETE FROM holdfast_cluster.silence WHERE alert = $1
