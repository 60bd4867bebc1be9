-- with_reason: the reasons a job failed with, and one more. The same once more is not added; of more than 64 the first
-- 63 are kept and the last.
CREATE OR REPLACE FUNCTION holdfast_work.with_reason(known smallint[], latest smallint) RETURNS smallint[]
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN latest IS NULL OR known[cardinality(known)] = latest THEN known ELSE known[1:63] || latest END;
$$;

-- fail: apply failure reports: retry, park, postpone or bury, and make or lift blocks. A report counts once: it names
-- the attempt it is about. Returns whether a report fitted no job: it was applied before, or somebody changed the job
-- while it ran.
-- actions: 1 retry, 2 park, 3 dead, 4 postpone (no attempt counted), 5 dead as poison (reason: what it failed with at
-- last); policies: 0 block, 1 skip, 2 park.
-- A run that is reported did not kill its worker, so a job that ran alone stays a suspect, but does not run alone again
-- before the next death.
CREATE OR REPLACE FUNCTION holdfast_work.fail(
    seqs bigint[], attempts integer[], actions smallint[], delays float8[], strike boolean[], policies smallint[],
    reasons smallint[], stages_done integer[], error_types text[], errors text[], traces text[], fingerprints text[]
) RETURNS boolean
LANGUAGE sql AS $$
    WITH given AS (
        SELECT * FROM unnest(seqs, attempts, actions, delays, strike, policies, reasons, stages_done, error_types,
                             errors, traces, fingerprints)
            AS g(seq, attempt, action, delay, strike, policy, reason, stages, error_type, error, trace, fingerprint)
    ), kept AS (
        UPDATE holdfast_work.job AS j
           SET attempt = j.attempt + CASE WHEN g.action = 4 THEN 0 ELSE 1 END,
               strikes = j.strikes + g.strike::integer,
               crashes = least(j.crashes, 1),
               stages = j.stages | g.stages,
               state = CASE WHEN g.action = 2 OR j.state = 3 THEN 3 ELSE 1 END,  -- parked while it ran: it stays so
               due_at = CASE WHEN g.action = 2 OR j.state = 3 THEN NULL ELSE clock_timestamp() + g.delay * interval '1 second' END,
               -- What is only put off keeps what is known of its own failure.
               reason = CASE WHEN g.action = 4 THEN coalesce(j.reason, g.reason) ELSE g.reason END,
               error_type = CASE WHEN g.action = 4 THEN coalesce(j.error_type, g.error_type) ELSE g.error_type END,
               error = CASE WHEN g.action = 4 THEN coalesce(j.error, g.error) ELSE g.error END,
               trace = CASE WHEN g.action = 4 THEN coalesce(j.trace, g.trace) ELSE g.trace END,
               fingerprint = CASE WHEN g.action = 4 THEN coalesce(j.fingerprint, g.fingerprint) ELSE g.fingerprint END,
               failed_at = CASE WHEN g.action = 4 THEN j.failed_at ELSE clock_timestamp() END,
               reasons = CASE WHEN g.action = 4 THEN j.reasons ELSE holdfast_work.with_reason(j.reasons, g.reason) END
          FROM given AS g
         WHERE j.seq = g.seq AND j.attempt = g.attempt - 1 AND g.action NOT IN (3, 5)
        RETURNING j.seq, j.stream, j.partition, g.policy
    ), blocked AS (
        INSERT INTO holdfast_work.block (head, stream, partition, policy)
        SELECT seq, stream, partition, policy FROM kept WHERE stream IS NOT NULL AND policy <> 1
        ON CONFLICT DO NOTHING
    ), skipped AS (
        DELETE FROM holdfast_work.block WHERE head IN (SELECT seq FROM kept WHERE policy = 1)
    ), removed AS (
        DELETE FROM holdfast_work.job AS j USING given AS g
         WHERE j.seq = g.seq AND j.attempt = g.attempt - 1 AND g.action IN (3, 5)
        RETURNING j.xid, j.seq, j.created_at, j.origin, g.attempt, j.strikes + g.strike::integer AS strikes, j.crashes,
                  j.stages | g.stages AS stages, j.partition, j.state, j.type, j.destination, j.payload, j.stream,
                  NULL::timestamptz AS due_at, j.source, j.source_id,
                  CASE WHEN g.action = 5 THEN 7::smallint ELSE g.reason END, g.error_type, g.error, g.trace,
                  g.fingerprint, clock_timestamp() AS failed_at,
                  holdfast_work.with_reason(holdfast_work.with_reason(j.reasons, g.reason),
                                            CASE WHEN g.action = 5 THEN 7::smallint END) AS reasons
    ), buried AS (
        INSERT INTO holdfast_work.dead SELECT removed.*, now() FROM removed RETURNING seq
    ), lifted AS (
        DELETE FROM holdfast_work.block WHERE head IN (SELECT seq FROM buried)
    )
    SELECT (SELECT count(*) FROM kept) + (SELECT count(*) FROM removed) < cardinality(seqs);
$$;

-- process: the one round trip of a worker: report and claim in one transaction.
--
--   fence -> delete completed (with their children stored) -> failures -> held, released -> due retries -> read
--
-- me:        the worker's instance; when its row is gone its lease is lost, and nothing else happens.
-- completed: jobs that are done; children (c_*) are stored exactly when their parent is deleted here.
-- f_*:       failure reports, see fail().
-- held:      jobs that wait behind a block; released: jobs let past the blocks of their streams.
-- running:   what is in flight; the first `starting` claimed jobs that are no suspects are added to it.
-- is_sleeping: wake this worker, with a NOTIFY, at the next enqueue; counts only if nothing is found now.
-- want, bytes_max: how much to read at most; owned: a bit per partition, NULL for all.
-- settled, through, seen, seen_by, late: where the worker's sweep stands, see work/postgres/sweep.py.
-- b_stream, b_after, b_limit, b_bytes: streams whose held jobs are wanted, after which sequence, how much of each.
-- shut:      job types whose breaker is not closed: their due retries stay where they are, but for one of each `probing`.
--
-- kinds:     0 ready jobs after `through`, 1 the wanted backlogs, 2 jobs of transactions that ended late, 3 due retries.
-- overflow: a transaction that ended late has more jobs than there is room for: nothing is handed out of turn, the
-- worker rewinds and reads them in order, in its own pieces.
--
-- The read is one statement, hence one snapshot: of a stream, a later job is never seen without an earlier one.
CREATE OR REPLACE FUNCTION holdfast_work.process(
    me bigint, completed bigint[],
    f_seq bigint[], f_attempt integer[], f_action smallint[], f_delay float8[], f_strike boolean[], f_policy smallint[],
    f_reason smallint[], f_stages integer[], f_type text[], f_error text[], f_trace text[], f_fingerprint text[],
    held bigint[], released bigint[],
    c_parent bigint[], c_partition smallint[], c_lane integer[], c_stream text[], c_type text[], c_destination text[],
    c_payload bytea[], c_delay float8[],
    running bigint[], is_sleeping boolean, want integer, bytes_max bigint, starting integer, owned bytea,
    settled bigint, through bigint, seen pg_snapshot, seen_by xid8, late xid8[],
    b_stream text[], b_after bigint[], b_limit integer, b_bytes bigint, shut text[], probing text[],
    OUT lost boolean, OUT noticed boolean, OUT busy bigint[], OUT xid text, OUT snapshot text, OUT read_through bigint,
    OUT overflow boolean, OUT due_in float8, OUT started bigint[],
    OUT seqs bigint[], OUT kinds smallint[], OUT types text[], OUT payloads bytea[], OUT streams text[],
    OUT destinations text[], OUT partitions smallint[], OUT attempts integer[], OUT strikes integer[],
    OUT crashes integer[], OUT stages integer[], OUT origins bigint[]
)
LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    busy_streams text[];
    open_types text[];  -- NULL: all of them
    probes bigint[];
    due bigint[];
    heads bigint[];
    room  bigint := greatest(bytes_max, 1);  -- one job always fits, or the read would go past it
    slack bigint := 8388608;                 -- what ended late may be this much more
BEGIN
    SELECT notice INTO noticed FROM holdfast_work.instance WHERE id = me FOR NO KEY UPDATE;
    lost := NOT FOUND;
    IF lost THEN
        RETURN;
    END IF;
    process.xid := pg_current_xact_id()::text;

    -- Who only asks does not wait for the disk: what is lost with the server is read again after it.
    IF cardinality(completed) + cardinality(f_seq) + cardinality(held) + cardinality(released) + cardinality(c_parent) = 0 THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;

    -- Children whose stream is locked by an open transaction must not make this worker wait: they come again.
    IF cardinality(c_parent) > 0 THEN
        busy_streams := holdfast_work.try_lock_streams(c_lane, c_stream);
        SELECT array_agg(DISTINCT parent) INTO process.busy
          FROM unnest(c_parent, c_stream) AS c(parent, stream) WHERE stream = ANY (busy_streams);
        WITH done AS (
            DELETE FROM holdfast_work.job WHERE seq = ANY (c_parent) AND seq <> ALL (coalesce(process.busy, '{}')) RETURNING seq
        ), born AS (
            SELECT c.* FROM unnest(c_parent, c_partition, c_stream, c_type, c_destination, c_payload, c_delay)
                WITH ORDINALITY AS c(parent, partition, stream, type, destination, payload, delay, n)
              JOIN done ON done.seq = c.parent
        )
        SELECT holdfast_work.insert_jobs(array_agg(partition ORDER BY n), array_agg(stream ORDER BY n),
                                         array_agg(type ORDER BY n), array_agg(destination ORDER BY n),
                                         array_agg(payload ORDER BY n), array_agg(delay ORDER BY n))
          INTO due FROM born HAVING count(*) > 0;
        due := NULL;
        DELETE FROM holdfast_work.block WHERE head = ANY (c_parent) AND head <> ALL (coalesce(process.busy, '{}'));
    END IF;
    IF cardinality(completed) > 0 THEN
        -- Only a job that had a due time or was parked while it ran can be the head of a block.
        WITH done AS (
            DELETE FROM holdfast_work.job WHERE seq = ANY (completed) AND seq <> ALL (coalesce(process.busy, '{}'))
            RETURNING seq, due_at IS NOT NULL OR state = 3 AS may_head
        )
        SELECT array_agg(seq) INTO heads FROM done WHERE may_head;
        IF heads IS NOT NULL THEN
            DELETE FROM holdfast_work.block WHERE head = ANY (heads);
        END IF;
    END IF;
    IF cardinality(f_seq) > 0 THEN
        -- A job that was changed while it ran (its attempts forgotten, say) may wait where this worker has read already.
        noticed := holdfast_work.fail(f_seq, f_attempt, f_action, f_delay, f_strike, f_policy, f_reason, f_stages, f_type,
                                      f_error, f_trace, f_fingerprint) OR noticed;
    END IF;
    IF cardinality(held) > 0 THEN
        UPDATE holdfast_work.job SET state = 2 WHERE seq = ANY (held) AND state = 0;
    END IF;
    IF cardinality(released) > 0 THEN
        UPDATE holdfast_work.block AS b SET released_ids = b.released_ids || j.ids, by = i.name, why = 'released by its worker'
          FROM (SELECT stream, array_agg(seq) AS ids FROM holdfast_work.job WHERE seq = ANY (released) GROUP BY stream) AS j,
               holdfast_work.instance AS i
         WHERE b.stream = j.stream AND i.id = me;
        noticed := true;
    END IF;

    -- Due retries become ready; being this worker's own rows they are contended by nobody. While some types are shut,
    -- the others are read one by one, each by its own part of the index: however many retries of a shut type are due,
    -- they are not looked at.
    IF cardinality(shut) > 0 THEN
        WITH RECURSIVE scheduled AS (
            (SELECT j.type FROM holdfast_work.job AS j WHERE j.state = 1 ORDER BY j.type LIMIT 1)
            UNION ALL
            SELECT (SELECT j.type FROM holdfast_work.job AS j WHERE j.state = 1 AND j.type > s.type ORDER BY j.type LIMIT 1)
              FROM scheduled AS s WHERE s.type IS NOT NULL
        )
        SELECT coalesce(array_agg(s.type), '{}') INTO open_types FROM scheduled AS s WHERE s.type <> ALL (shut);
    END IF;
    IF cardinality(probing) > 0 THEN
        SELECT array_agg(one.seq) INTO probes
          FROM unnest(probing) AS t(type)
         CROSS JOIN LATERAL (SELECT seq FROM holdfast_work.job AS j
                              WHERE j.state = 1 AND j.due_at <= clock_timestamp() AND j.type = t.type
                                AND (owned IS NULL OR get_bit(owned, j.partition) = 1)
                              ORDER BY j.due_at LIMIT 1) AS one;
    END IF;
    IF want > 0 THEN
        WITH candidates AS (
            (SELECT seq, due_at, octet_length(payload) AS size FROM holdfast_work.job
              WHERE open_types IS NULL AND state = 1 AND due_at <= clock_timestamp()
                AND (owned IS NULL OR get_bit(owned, partition) = 1)
              ORDER BY due_at LIMIT want)
            UNION ALL
            SELECT one.* FROM unnest(open_types) AS t(type)
             CROSS JOIN LATERAL (SELECT j.seq, j.due_at, octet_length(j.payload) FROM holdfast_work.job AS j
                                  WHERE j.state = 1 AND j.due_at <= clock_timestamp() AND j.type = t.type
                                    AND (owned IS NULL OR get_bit(owned, j.partition) = 1)
                                  ORDER BY j.due_at LIMIT want) AS one
            UNION ALL
            SELECT seq, due_at, octet_length(payload) FROM holdfast_work.job WHERE seq = ANY (probes)
        ), chosen AS (
            SELECT seq, sum(size) OVER (ORDER BY due_at ROWS UNBOUNDED PRECEDING) - size AS before
              FROM candidates ORDER BY due_at LIMIT want
        ), woken AS (
            UPDATE holdfast_work.job SET state = 0 WHERE seq IN (SELECT seq FROM chosen WHERE before < room) RETURNING seq
        )
        SELECT coalesce(array_agg(seq), '{}') INTO due FROM woken;
    END IF;
    IF open_types IS NULL THEN
        SELECT extract(epoch FROM due_at - clock_timestamp()) INTO due_in FROM holdfast_work.job
         WHERE state = 1 AND (owned IS NULL OR get_bit(owned, partition) = 1) ORDER BY due_at LIMIT 1;
    ELSE
        SELECT extract(epoch FROM min(one.due_at) - clock_timestamp()) INTO due_in FROM unnest(open_types) AS t(type)
         CROSS JOIN LATERAL (SELECT j.due_at FROM holdfast_work.job AS j
                              WHERE j.state = 1 AND j.type = t.type AND (owned IS NULL OR get_bit(owned, j.partition) = 1)
                              ORDER BY j.due_at LIMIT 1) AS one;
    END IF;

    IF want > 0 THEN
        WITH forward AS (
            SELECT seq, type, payload, stream, destination, partition, attempt, strikes, crashes, stages, origin,
                   sum(octet_length(payload)) OVER (ORDER BY seq ROWS UNBOUNDED PRECEDING) AS weight
              FROM holdfast_work.job
             WHERE seq > through AND state = 0 AND (owned IS NULL OR get_bit(owned, partition) = 1)
             ORDER BY seq LIMIT want
        ), appeared AS (
            (SELECT * FROM holdfast_work.job
              WHERE seq > settled AND seq <= through AND NOT pg_visible_in_snapshot(xid, seen) AND xid <> seen_by
                AND seq <> ALL (due) AND state = 0 AND (owned IS NULL OR get_bit(owned, partition) = 1) LIMIT want + 257)
            UNION ALL  -- "+ 0" leaves just the index by xid, whatever the planner believes about the table
            (SELECT * FROM holdfast_work.job
              WHERE xid = ANY (late) AND seq + 0 <= settled
                AND seq <> ALL (due) AND state + 0 = 0 AND (owned IS NULL OR get_bit(owned, partition) = 1) LIMIT want + 257)
        ), overdue AS (
            SELECT *, sum(octet_length(payload)) OVER (ORDER BY seq ROWS UNBOUNDED PRECEDING) AS weight FROM appeared
        ), backlog AS (
            SELECT h.* FROM unnest(b_stream, b_after) AS b(stream, after)
             CROSS JOIN LATERAL (SELECT *, sum(octet_length(payload)) OVER (ORDER BY seq ROWS UNBOUNDED PRECEDING) AS weight
                                   FROM holdfast_work.job AS j
                                  WHERE j.stream = b.stream AND j.seq > b.after AND j.state = 2
                                    AND (owned IS NULL OR get_bit(owned, j.partition) = 1)
                                  ORDER BY j.seq LIMIT b_limit) AS h
             WHERE weight - octet_length(payload) < greatest(b_bytes, 1)
        ), found AS (
            SELECT 0::smallint AS kind, seq, type, payload, stream, destination, partition, attempt, strikes, crashes, stages,
                   origin, weight
              FROM forward WHERE weight - octet_length(payload) < room
            UNION ALL
            SELECT 1::smallint, seq, type, payload, stream, destination, partition, attempt, strikes, crashes, stages, origin, 0
              FROM backlog
            UNION ALL
            SELECT 2::smallint, seq, type, payload, stream, destination, partition, attempt, strikes, crashes, stages, origin, weight
              FROM overdue WHERE weight - octet_length(payload) < room + slack
            UNION ALL
            SELECT 3::smallint, seq, type, payload, stream, destination, partition, attempt, strikes, crashes, stages, origin, 0
              FROM holdfast_work.job WHERE seq = ANY (due) AND seq <= through
        )
        SELECT pg_current_snapshot()::text,
               count(*) FILTER (WHERE kind = 2) > want + 256 OR coalesce(max(weight) FILTER (WHERE kind = 2) >= room + slack, false),
               CASE WHEN count(*) FILTER (WHERE kind = 0) = want OR max(weight) FILTER (WHERE kind = 0) >= room
                    THEN max(seq) FILTER (WHERE kind = 0)
                    -- Drawn before the next call takes its id, so it may be a checkpoint like a row that was seen.
                    ELSE greatest(max(seq) FILTER (WHERE kind = 0),
                                  (SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM holdfast_work.job_seq)) END,
               array_agg(seq), array_agg(kind), array_agg(type), array_agg(payload), array_agg(stream),
               array_agg(destination), array_agg(partition), array_agg(attempt), array_agg(strikes), array_agg(crashes),
               array_agg(stages), array_agg(origin)
          INTO process.snapshot, overflow, read_through, seqs, kinds, types, payloads, streams, destinations, partitions,
               attempts, process.strikes, process.crashes, process.stages, origins
          FROM found;
        IF starting > 0 AND seqs IS NOT NULL THEN
            SELECT array_agg(s) INTO process.started
              FROM (SELECT s FROM unnest(seqs, kinds, process.crashes) AS u(s, k, c) WHERE k <> 1 AND c = 0 ORDER BY s LIMIT starting) AS first;
        END IF;
    END IF;

    UPDATE holdfast_work.instance
       SET beat_at = clock_timestamp(), running = process.running || coalesce(process.started, '{}'),
           sleeping = is_sleeping AND seqs IS NULL,
           notice = false
     WHERE id = me;
END $$;
