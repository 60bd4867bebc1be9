-- enqueue: store jobs in the caller's transaction, in the order of the arrays; returns their sequences, 0 for one that
-- the inbox has seen before.
--
-- lanes: where a stream's lane is, NULL for a job without a stream. Streams are locked to the commit, see lock_streams.
-- sources, source_ids: NULL for an outbox; else each pair is stored once.
--
-- With its owner's rights, so that a role that may only enqueue needs none of its own but to call it.
--
-- Waits at most 5 s for other producers of its streams, and as long for a transaction that has stored one of its inbox
-- ids and is still open; then 55P03, and nothing is stored.
CREATE OR REPLACE FUNCTION holdfast_work.enqueue(
    partitions smallint[], lanes integer[], streams text[], types text[], destinations text[], payloads bytea[],
    delays float8[], sources text[] DEFAULT NULL, source_ids text[] DEFAULT NULL
) RETURNS bigint[]
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '5s'
AS $$
DECLARE
    give_up timestamptz := clock_timestamp() + interval '5 seconds';
BEGIN
    PERFORM holdfast_work.lock_streams(lanes, streams);
    IF sources IS NOT NULL THEN
        PERFORM set_config('lock_timeout', holdfast_work.milliseconds_until(give_up), true);
    END IF;
    RETURN holdfast_work.insert_jobs(partitions, streams, types, destinations, payloads, delays, sources, source_ids);
END $$;

REVOKE EXECUTE ON FUNCTION holdfast_work.enqueue FROM PUBLIC;

-- insert_jobs: enqueue, for streams that are locked.
CREATE OR REPLACE FUNCTION holdfast_work.insert_jobs(
    partitions smallint[], streams text[], types text[], destinations text[], payloads bytea[], delays float8[],
    sources text[] DEFAULT NULL, source_ids text[] DEFAULT NULL
) RETURNS bigint[]
LANGUAGE plpgsql AS $$
DECLARE
    result bigint[];
    fresh  integer[];
BEGIN
    IF sources IS NOT NULL THEN
        WITH first AS (
            SELECT min(n)::integer AS n, s, i
              FROM unnest(sources, source_ids) WITH ORDINALITY AS k(s, i, n) WHERE s IS NOT NULL GROUP BY s, i
        ), stored AS (
            INSERT INTO holdfast_work.seen (source, id) SELECT s, i FROM first ORDER BY s, i
            ON CONFLICT DO NOTHING RETURNING source, id
        )
        SELECT array_agg(n) INTO fresh FROM (
            SELECT first.n FROM first JOIN stored ON (stored.source, stored.id) = (first.s, first.i)
            UNION ALL
            SELECT n FROM unnest(sources) WITH ORDINALITY AS k(s, n) WHERE s IS NULL
        ) AS kept;
    END IF;

    WITH given AS (
        SELECT * FROM unnest(partitions, streams, types, destinations, payloads, delays, sources, source_ids)
            WITH ORDINALITY AS g(partition, stream, type, destination, payload, delay, source, source_id, n)
         WHERE sources IS NULL OR n = ANY (fresh)
    ), stored AS (
        INSERT INTO holdfast_work.job (partition, state, type, destination, payload, stream, due_at, source, source_id)
        SELECT partition, CASE WHEN delay > 0 THEN 1 ELSE 0 END, type, destination, payload, stream,
               CASE WHEN delay > 0 THEN now() + delay * interval '1 second' END, source, source_id
          FROM given
        RETURNING seq
    )
    SELECT array_agg(seq) INTO result FROM stored;

    IF cardinality(fresh) IS DISTINCT FROM cardinality(types) AND sources IS NOT NULL THEN
        SELECT array_agg(coalesce(stored.seq, 0) ORDER BY n) INTO result
          FROM generate_series(1, cardinality(types)) AS n
          LEFT JOIN (SELECT f.n, s.seq FROM (SELECT n, row_number() OVER (ORDER BY n) AS place FROM unnest(fresh) AS u(n)) AS f
                       JOIN unnest(result) WITH ORDINALITY AS s(seq, place) USING (place)) AS stored USING (n);
    END IF;

    -- A NOTIFY for each insert would cost half the speed: only those who said that they sleep are woken.
    PERFORM pg_notify('holdfast_work', instance.id::text)
       FROM holdfast_work.instance
      WHERE sleeping
        AND EXISTS (SELECT FROM holdfast_work.partition WHERE owner = instance.id AND partition.id = ANY (partitions));
    RETURN result;
END $$;
