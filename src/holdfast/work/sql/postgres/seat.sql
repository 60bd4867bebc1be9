-- name: join
-- $1 name
INSERT INTO holdfast_work.instance (name) VALUES ($1) RETURNING id

-- name: beat
-- $1 instance
UPDATE holdfast_work.instance SET beat_at = clock_timestamp() WHERE id = $1 RETURNING id

-- name: alive
SELECT id FROM holdfast_work.instance ORDER BY id

-- name: owners
SELECT id, owner FROM holdfast_work.partition

-- name: take
-- Lease partitions that are free, or leased by a call whose answer was lost. $1 instance, $2 partitions
UPDATE holdfast_work.partition SET owner = $1, epoch = epoch + 1
 WHERE id = ANY ($2::smallint[]) AND (owner IS NULL OR owner = $1)
   AND EXISTS (SELECT FROM holdfast_work.instance WHERE id = $1 FOR SHARE)
RETURNING id, epoch

-- name: give
-- $1 instance, $2 partitions
UPDATE holdfast_work.partition SET owner = NULL WHERE id = ANY ($2::smallint[]) AND owner = $1

-- name: step
-- Add completed stages to a running job of this owner; whether it still owns it, and whether the job was there.
-- $1 seq, $2 stages, $3 partition, $4 instance
WITH owned AS MATERIALIZED (
    SELECT FROM holdfast_work.partition WHERE id = $3 AND owner = $4 FOR SHARE
), stepped AS (
    UPDATE holdfast_work.job SET stages = stages | $2 WHERE seq = $1 AND EXISTS (SELECT FROM owned) RETURNING seq
)
SELECT EXISTS (SELECT FROM owned) AS owned, EXISTS (SELECT FROM stepped) AS found

-- name: finish
-- Complete a job inside its handler's own transaction, under the lease; whether it still owns it, and whether the job
-- was there. $1 seq, $2 partition, $3 instance
WITH owned AS MATERIALIZED (
    SELECT FROM holdfast_work.partition WHERE id = $2 AND owner = $3 FOR SHARE
), done AS (
    DELETE FROM holdfast_work.job WHERE seq = $1 AND EXISTS (SELECT FROM owned) RETURNING seq
), lifted AS (
    DELETE FROM holdfast_work.block WHERE head IN (SELECT seq FROM done)
)
SELECT EXISTS (SELECT FROM owned) AS owned, EXISTS (SELECT FROM done) AS found

-- name: leave
-- What a leaving worker had not finished is no crash. $1 instance
UPDATE holdfast_work.instance SET running = '{}' WHERE id = $1
