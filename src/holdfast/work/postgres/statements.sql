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

-- name: bury_dead
-- $1 seconds without a beat, $2 crashes at which a job is poison
SELECT holdfast_work.bury_dead($1, $2)

-- name: take
-- Lease partitions that are free, or leased by a call whose answer was lost. $1 instance, $2 partitions
UPDATE holdfast_work.partition SET owner = $1, epoch = epoch + 1
 WHERE id = ANY ($2::smallint[]) AND (owner IS NULL OR owner = $1)
   AND EXISTS (SELECT FROM holdfast_work.instance WHERE id = $1 FOR SHARE)
RETURNING id, epoch

-- name: give
-- Not before earlier calls of this worker are over, see `calls_over`. $1 instance, $2 partitions
UPDATE holdfast_work.partition SET owner = NULL
 WHERE id = ANY ($2::smallint[]) AND owner = $1
   AND EXISTS (SELECT FROM holdfast_work.instance WHERE id = $1 FOR SHARE)

-- name: calls_over
-- Wait until earlier calls of this worker are over: one whose answer was lost may still be under way, and mark jobs as
-- held that are about to be read as ready. $1 instance
SELECT FROM holdfast_work.instance WHERE id = $1 FOR SHARE

-- name: process
-- The one round trip of a worker; functions/process.sql names its arguments, in this order: who reports, what is
-- completed, $3 to $14 failures, what is held and released, $17 to $24 children, what runs and how much is wanted,
-- $31 to $35 where its sweep stands, $36 to $39 backlogs, and the types that are shut.
SELECT * FROM holdfast_work.process(
    $1, $2,
    $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14,
    $15, $16,
    $17, $18, $19, $20, $21, $22, $23, $24,
    $25, $26, $27, $28, $29, $30,
    $31, $32, $33::text::pg_snapshot, $34::text::xid8, $35::text[]::xid8[],
    $36, $37, $38, $39,
    $40, $41)

-- name: step
-- Add completed stages to a running job of this owner; whether it still owns it, and whether the job was there.
-- $1 seq, $2 stages, $3 partition, $4 instance
WITH owned AS MATERIALIZED (
    SELECT FROM holdfast_work.partition WHERE id = $3 AND owner = $4 FOR SHARE
), stepped AS (
    UPDATE holdfast_work.job SET stages = stages | $2 WHERE seq = $1 AND EXISTS (SELECT FROM owned) RETURNING seq
)
SELECT EXISTS (SELECT FROM owned) AS owned, EXISTS (SELECT FROM stepped) AS found

-- name: transaction
-- What tells the transaction of a handler from every other: COMMIT or ROLLBACK inside it makes another one.
SELECT pg_current_xact_id()::text

-- name: finish
-- Complete a job inside its handler's own transaction, under the lease; whether it still is that transaction, whether it
-- still owns the job, and whether the job was there. $1 seq, $2 partition, $3 instance, $4 the transaction
WITH owned AS MATERIALIZED (
    SELECT FROM holdfast_work.partition
     WHERE id = $2 AND owner = $3 AND pg_current_xact_id()::text = $4::text FOR SHARE
), done AS (
    DELETE FROM holdfast_work.job WHERE seq = $1 AND EXISTS (SELECT FROM owned) RETURNING seq
), lifted AS (
    DELETE FROM holdfast_work.block WHERE head IN (SELECT seq FROM done)
)
SELECT pg_current_xact_id()::text = $4::text AS same, EXISTS (SELECT FROM owned) AS owned,
       EXISTS (SELECT FROM done) AS found

-- name: leave
-- What a leaving worker had not finished is no crash. $1 instance
UPDATE holdfast_work.instance SET running = '{}' WHERE id = $1

-- name: count_crash
-- After its failure was stored, which may have buried it. $1 seq
WITH kept AS (UPDATE holdfast_work.job SET crashes = crashes + 1 WHERE seq = $1)
UPDATE holdfast_work.dead SET crashes = crashes + 1 WHERE seq = $1

-- name: bury_left
-- $1 crashes at which a job is poison, $2 the instance that has left
SELECT holdfast_work.bury_dead(0, $1, $2)

-- name: find
-- Jobs by sequence. $1 seqs (empty: any), $2 type, $3 stream, $4 reason, $5 state, $6 fingerprint (NULL: any), $7 limit
SELECT seq, type, stream, state, attempt, strikes, crashes, stages, extract(epoch FROM created_at)::float8 AS created_at,
       extract(epoch FROM due_at)::float8 AS due_at, destination, payload, reason, error_type, error, trace, fingerprint,
       source, source_id, origin, NULL::float8 AS dead_at, reasons
  FROM holdfast_work.job
 WHERE (cardinality($1::bigint[]) = 0 OR seq = ANY ($1)) AND ($2::text IS NULL OR type = $2)
   AND ($3::text IS NULL OR stream = $3) AND ($4::smallint IS NULL OR reason = $4)
   AND ($5::smallint IS NULL OR state = $5) AND ($6::text IS NULL OR fingerprint = $6)
 ORDER BY seq LIMIT $7

-- name: dead
-- Dead letters, newest first; arguments as in find.
SELECT seq, type, stream, state, attempt, strikes, crashes, stages, extract(epoch FROM created_at)::float8 AS created_at,
       NULL::float8 AS due_at, destination, payload, reason, error_type, error, trace, fingerprint,
       source, source_id, origin, extract(epoch FROM dead_at)::float8 AS dead_at, reasons
  FROM holdfast_work.dead
 WHERE (cardinality($1::bigint[]) = 0 OR seq = ANY ($1)) AND ($2::text IS NULL OR type = $2)
   AND ($3::text IS NULL OR stream = $3) AND ($4::smallint IS NULL OR reason = $4)
   AND ($5::smallint IS NULL OR state = $5) AND ($6::text IS NULL OR fingerprint = $6)
 ORDER BY dead_at DESC, seq DESC LIMIT $7

-- name: exhume
-- Take dead letters out, oldest first; arguments as in find.
DELETE FROM holdfast_work.dead WHERE seq IN (
    SELECT seq FROM holdfast_work.dead
     WHERE (cardinality($1::bigint[]) = 0 OR seq = ANY ($1)) AND ($2::text IS NULL OR type = $2)
       AND ($3::text IS NULL OR stream = $3) AND ($4::smallint IS NULL OR reason = $4)
       AND ($5::smallint IS NULL OR state = $5) AND ($6::text IS NULL OR fingerprint = $6)
     ORDER BY seq LIMIT $7 FOR UPDATE SKIP LOCKED)
RETURNING seq, type, stream, destination, payload, stages, origin, source, source_id

-- name: remember
-- A replayed job keeps its first id, its progress and where it came from. $1 new seqs, $2 origins, $3 stages, $4 sources, $5 source ids
UPDATE holdfast_work.job AS j SET origin = g.origin, stages = g.stages, source = g.source, source_id = g.source_id
  FROM unnest($1::bigint[], $2::bigint[], $3::integer[], $4::text[], $5::text[]) AS g(seq, origin, stages, source, source_id)
 WHERE j.seq = g.seq

-- name: retry
-- Make waiting or parked jobs due now. $1 seqs, $2 whether attempts and strikes are forgotten
UPDATE holdfast_work.job
   SET state = 1, due_at = clock_timestamp(), attempt = CASE WHEN $2 THEN 0 ELSE attempt END,
       strikes = CASE WHEN $2 THEN 0 ELSE strikes END, crashes = CASE WHEN $2 THEN 0 ELSE crashes END
 WHERE seq = ANY ($1::bigint[]) AND state IN (1, 3) RETURNING partition

-- name: park
-- Stop jobs and, with a block, the streams behind them. $1 seqs, $2 by, $3 why
WITH parked AS (
    UPDATE holdfast_work.job SET state = 3, due_at = NULL WHERE seq = ANY ($1::bigint[]) AND state <> 3
    RETURNING seq, stream, partition
), blocked AS (
    INSERT INTO holdfast_work.block (head, stream, partition, policy, by, why)
    SELECT seq, stream, partition, 2, $2, $3 FROM parked WHERE stream IS NOT NULL
    ON CONFLICT (head) DO UPDATE SET policy = 2, by = excluded.by, why = excluded.why
)
SELECT partition FROM parked

-- name: release
-- Let jobs pass every block of their stream. $1 stream, $2 ids, $3 types, $4 through, $5 by, $6 why
UPDATE holdfast_work.block
   SET released_ids = released_ids || $2::bigint[], released_types = released_types || $3::text[],
       released_through = greatest(released_through, $4), by = $5, why = $6
 WHERE stream = $1 RETURNING partition

-- name: lock_owners
-- Before anything is changed: a worker's call locks its own row first and its jobs then, so whoever acts on them does
-- the same, or they wait for each other. $1 seqs, $2 stream (NULL: none)
SELECT FROM holdfast_work.instance WHERE id IN (
    SELECT p.owner FROM holdfast_work.partition AS p WHERE p.id IN (
        SELECT partition FROM holdfast_work.job WHERE seq = ANY ($1::bigint[])
        UNION ALL SELECT partition FROM holdfast_work.block WHERE stream = $2::text))
 ORDER BY id FOR NO KEY UPDATE

-- name: bury
-- $1 seqs
SELECT holdfast_work.bury($1::bigint[])

-- name: name_reason
-- Why jobs were buried. $1 seqs, $2 reason, $3 and $4 the error's type and text
UPDATE holdfast_work.dead SET reason = $2, error_type = $3, error = $4, trace = NULL, fingerprint = NULL,
       reasons = holdfast_work.with_reason(reasons, $2::smallint)
 WHERE seq = ANY ($1::bigint[])

-- name: waiting
-- $1 destinations. The index has only jobs with a destination, which the last condition says.
SELECT d.name, count(*) AS jobs, extract(epoch FROM min(j.created_at))::float8 AS oldest_at
  FROM unnest($1::text[]) AS d(name) JOIN holdfast_work.job AS j ON j.destination = d.name AND j.destination <> ''
 GROUP BY d.name

-- name: oldest
-- $1 destination, $2 before (seconds since the epoch), $3 limit
SELECT seq FROM (
    SELECT seq, created_at FROM holdfast_work.job WHERE destination = $1 AND destination <> '' ORDER BY seq LIMIT $3
) AS first WHERE created_at < to_timestamp($2)

-- name: tell
-- $1 partitions whose owners shall read everything again
SELECT holdfast_work.tell($1::smallint[])

-- name: partitions_of
-- $1 seqs
SELECT partition FROM holdfast_work.job WHERE seq = ANY ($1::bigint[])

-- name: record
-- And forget the oldest. $1 verb, $2 target, $3 count, $4 by, $5 why, $6 how many are kept
WITH recorded AS (
    INSERT INTO holdfast_work.act (verb, target, count, by, why) VALUES ($1, $2, $3, $4, $5) RETURNING number
)
DELETE FROM holdfast_work.act WHERE number <= (SELECT number FROM recorded) - $6::bigint

-- name: acts
-- $1 limit, $2 before which number (NULL: the newest)
SELECT number, extract(epoch FROM at)::float8 AS at, verb, target, count, by, why FROM holdfast_work.act
 WHERE $2::bigint IS NULL OR number < $2 ORDER BY number DESC LIMIT $1

-- name: streams
-- Blocked streams, longest waiting first. $1 limit
WITH chosen AS (SELECT * FROM holdfast_work.block ORDER BY since LIMIT $1),
waiting AS (
    SELECT chosen.head, count(*) AS n FROM chosen JOIN holdfast_work.job ON job.stream = chosen.stream AND job.seq > chosen.head
     GROUP BY chosen.head
)
SELECT b.*, coalesce(w.n, 0) AS waiting, j.type AS head_type, j.attempt AS head_attempt, j.reason AS head_reason,
       j.error AS head_error, extract(epoch FROM j.due_at)::float8 AS head_due_at, extract(epoch FROM b.since)::float8 AS since_at
  FROM chosen AS b LEFT JOIN waiting AS w USING (head) LEFT JOIN holdfast_work.job AS j ON j.seq = b.head
 ORDER BY b.since

-- name: blocks
-- The blocks of some partitions. $1 a bit per partition, NULL for all
SELECT * FROM holdfast_work.block WHERE $1::bytea IS NULL OR get_bit($1, partition) = 1

-- name: backlogs
-- Streams of some partitions ($1, as above) with held jobs, but for those that wait behind a block past which nothing
-- was released. From stream to stream by the index: a stream costs the same however many of its jobs are held. With the
-- type and the destination of the first.
WITH RECURSIVE held AS (
    (SELECT stream, seq, partition, type, destination FROM holdfast_work.job WHERE state = 2 ORDER BY stream, seq LIMIT 1)
    UNION ALL
    SELECT next.* FROM held CROSS JOIN LATERAL (
        SELECT stream, seq, partition, type, destination FROM holdfast_work.job WHERE state = 2 AND stream > held.stream
         ORDER BY stream, seq LIMIT 1) AS next
)
SELECT stream, type, destination FROM held
 WHERE ($1::bytea IS NULL OR get_bit($1, partition) = 1) AND NOT EXISTS (
       SELECT FROM holdfast_work.block AS b WHERE b.stream = held.stream AND b.head < held.seq
          AND b.released_through = 0 AND b.released_ids = '{}' AND b.released_types = '{}')

-- name: groups
-- All jobs, in one pass, by what people ask about. A job that never failed waits since it is due, and one of a parked
-- destination ($1) not at all.
SELECT state, reason, attempt, count(*) AS jobs,
       extract(epoch FROM min(CASE WHEN reason IS NULL THEN greatest(created_at, due_at) ELSE created_at END)
               FILTER (WHERE destination <> ALL ($1::text[])))::float8 AS oldest,
       extract(epoch FROM min(due_at))::float8 AS next_due, extract(epoch FROM max(due_at))::float8 AS last_due
  FROM holdfast_work.job GROUP BY state, reason, attempt

-- name: totals
SELECT count(*) AS blocked, extract(epoch FROM now())::float8 AS now FROM holdfast_work.block

-- name: dead_counts
-- By the index dead_reason alone: 100,000 dead letters take 5 ms.
SELECT reason, count(*) FROM holdfast_work.dead GROUP BY reason

-- name: open_breakers
SELECT type, extract(epoch FROM open_until)::float8 AS open_until, by,
       extract(epoch FROM open_until - clock_timestamp())::float8 AS seconds
  FROM holdfast_work.breaker WHERE open_until > clock_timestamp() ORDER BY type

-- name: open_breaker
-- $1 type, $2 seconds, $3 by
INSERT INTO holdfast_work.breaker (type, open_until, by) VALUES ($1, clock_timestamp() + $2 * interval '1 second', $3)
ON CONFLICT (type) DO UPDATE SET open_until = greatest(breaker.open_until, excluded.open_until), by = excluded.by

-- name: close_breakers
-- $1 types
DELETE FROM holdfast_work.breaker WHERE type = ANY ($1::text[])

-- name: mark
-- How many of the marks are stored; the others were moved by another reader.
-- $1 readers, $2 positions, $3 the positions that they replace, null: none yet
WITH given AS (
    SELECT * FROM unnest($1::text[], $2::bigint[], $3::bigint[]) AS mark(name, position, replaces)
), made AS (
    INSERT INTO holdfast_work.reader (name, position)
    SELECT name, position FROM given WHERE replaces IS NULL ORDER BY name
    ON CONFLICT DO NOTHING RETURNING 1
), moved AS (
    UPDATE holdfast_work.reader SET position = given.position FROM given
    WHERE reader.name = given.name AND reader.position = given.replaces RETURNING 1
)
SELECT (SELECT count(*) FROM made) + (SELECT count(*) FROM moved)

-- name: position
-- $1 reader
SELECT position FROM holdfast_work.reader WHERE name = $1

-- name: lock_schema
-- One process at a time brings the schema up to date. $1 the lock
SELECT pg_advisory_xact_lock($1)

-- name: is_there
SELECT to_regclass('holdfast_work.version') IS NOT NULL

-- name: version
SELECT number FROM holdfast_work.version

-- name: claim
-- The first server keeps the schema. $1 its name
INSERT INTO holdfast_work.server (name) VALUES ($1) ON CONFLICT DO NOTHING

-- name: server
SELECT name FROM holdfast_work.server

-- name: forget_seen
-- Inbox ids older than the window, in batches. $1 seconds, $2 limit
DELETE FROM holdfast_work.seen WHERE (source, id) IN (
    SELECT source, id FROM holdfast_work.seen WHERE seen_at < now() - $1 * interval '1 second'
     LIMIT $2 FOR UPDATE SKIP LOCKED)
