-- Who stores jobs of a stream keeps all others from storing jobs of it, from before the sequence is drawn to the commit:
-- so within a stream sequence order is commit order. Other streams are not concerned, however long that takes, unless
-- the call has more than 64 streams: then all streams in their lanes (1,024 in all) wait for its end.
--
-- A stream is locked in one of two ways, and any two of them exclude each other:
--   its own lock EXCLUSIVE (class 1214869101, a hash of its name), under its lane's lock SHARED (class 1214869099); or
--   its lane's lock EXCLUSIVE, for a call with more than 64 streams: a lock per stream would exhaust the lock table.
-- 64 is PostgreSQL's default max_locks_per_transaction, so every connection at once may hold that many streams.
--
-- Locks are taken in one order, lanes before streams, both rising: two calls never wait for each other. A transaction
-- that calls twice can still deadlock with another one, and is then aborted (40P01).

-- lock_streams: wait for the streams of a call; at most 5 s in all, or 1 s for lanes: who waits for a whole lane keeps
-- everybody else waiting who wants a stream of it. lanes[n] is the lane of streams[n], NULL for a job without a stream.
CREATE OR REPLACE FUNCTION holdfast_work.lock_streams(lanes integer[], streams text[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    few      boolean := (SELECT count(DISTINCT stream) <= 64 FROM unnest(streams) AS s(stream));
    give_up  timestamptz := clock_timestamp() + CASE WHEN few THEN interval '5 seconds' ELSE interval '1 second' END;
    key      integer;
BEGIN
    FOR key IN SELECT DISTINCT lane FROM unnest(lanes) AS l(lane) WHERE lane IS NOT NULL ORDER BY lane LOOP
        IF NOT (CASE WHEN few THEN pg_try_advisory_xact_lock_shared(1214869099, key)
                     ELSE pg_try_advisory_xact_lock(1214869099, key) END) THEN
            PERFORM holdfast_work.wait_for_lock(1214869099, key, few, give_up);
        END IF;
    END LOOP;
    IF few THEN
        FOR key IN SELECT DISTINCT hashtext(stream) AS hash FROM unnest(streams) AS s(stream)
                    WHERE stream IS NOT NULL ORDER BY hash LOOP
            IF NOT pg_try_advisory_xact_lock(1214869101, key) THEN
                PERFORM holdfast_work.wait_for_lock(1214869101, key, false, give_up);
            END IF;
        END LOOP;
    END IF;
END $$;

-- wait_for_lock: until `give_up`, then 55P03 says what to do.
CREATE OR REPLACE FUNCTION holdfast_work.wait_for_lock(class integer, key integer, shared boolean, give_up timestamptz)
RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('lock_timeout', holdfast_work.milliseconds_until(give_up), true);
    IF shared THEN
        PERFORM pg_advisory_xact_lock_shared(class, key);
    ELSE
        PERFORM pg_advisory_xact_lock(class, key);
    END IF;
EXCEPTION WHEN lock_not_available THEN
    IF class = 1214869099 AND NOT shared THEN
        RAISE EXCEPTION 'other transactions are storing jobs in the lanes of these streams: split the call'
            USING ERRCODE = '55P03',
                  HINT = 'A call for at most 64 streams waits only for transactions that store jobs of the same streams.';
    END IF;
    IF class = 1214869099 THEN
        RAISE EXCEPTION 'a transaction that has stored jobs of more than 64 streams is still open: it holds their lanes'
            USING ERRCODE = '55P03',
                  HINT = 'Commit there at once, or store jobs of at most 64 streams in a transaction; repeat this one.';
    END IF;
    RAISE EXCEPTION 'another transaction has stored jobs of one of these streams and is still open'
        USING ERRCODE = '55P03', HINT = 'Enqueue as late as possible, commit at once, and repeat this transaction.';
END $$;

-- milliseconds_until: a value for lock_timeout, for which 0 would mean to wait without an end.
CREATE OR REPLACE FUNCTION holdfast_work.milliseconds_until(moment timestamptz) RETURNS text
LANGUAGE sql VOLATILE AS $$
    SELECT greatest(1, ceil(extract(epoch FROM moment - clock_timestamp()) * 1000))::bigint::text
$$;

-- try_lock_streams: the same locks without waiting; returns the streams that were not locked, NULL for none. Streams in
-- lanes that cannot be had as a whole are locked one by one, up to 64 of them.
CREATE OR REPLACE FUNCTION holdfast_work.try_lock_streams(lanes integer[], streams text[]) RETURNS text[]
LANGUAGE plpgsql AS $$
DECLARE
    whole integer[] := '{}';
    busy  text[];
BEGIN
    IF (SELECT count(DISTINCT stream) > 64 FROM unnest(streams) AS s(stream)) THEN
        SELECT coalesce(array_agg(lane), '{}') INTO whole
          FROM (SELECT DISTINCT lane FROM unnest(lanes) AS l(lane) WHERE lane IS NOT NULL) AS each
         WHERE pg_try_advisory_xact_lock(1214869099, lane);
    END IF;
    SELECT array_agg(stream) INTO busy
      FROM (SELECT lane, stream, row_number() OVER () AS n
              FROM (SELECT DISTINCT lane, stream FROM unnest(lanes, streams) AS s(lane, stream)
                     WHERE stream IS NOT NULL AND lane <> ALL (whole)) AS each) AS numbered
     WHERE CASE WHEN n > 64 THEN true
                WHEN NOT pg_try_advisory_xact_lock_shared(1214869099, lane) THEN true
                ELSE NOT pg_try_advisory_xact_lock(1214869101, hashtext(stream)) END;
    RETURN busy;
END $$;
