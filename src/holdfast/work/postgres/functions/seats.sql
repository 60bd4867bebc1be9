-- bury_dead: workers without a beat for `dead_after` seconds lose their lease. Their partitions become free with a
-- higher epoch; what they had in flight gets a crash, an attempt and a strike, and is buried as poison at `crashes_max`.
-- Rows that another worker is burying at this moment are left to it.
CREATE OR REPLACE FUNCTION holdfast_work.bury_dead(dead_after float8, crashes_max integer, only_instance bigint DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    gone   bigint[];
    blamed bigint[];
    fatal  bigint[];
BEGIN
    WITH silent AS (
        SELECT id FROM holdfast_work.instance
         WHERE (only_instance IS NULL AND beat_at < clock_timestamp() - dead_after * interval '1 second') OR id = only_instance
           FOR UPDATE SKIP LOCKED
    ), removed AS (
        DELETE FROM holdfast_work.instance WHERE id IN (SELECT id FROM silent) RETURNING id, running
    )
    SELECT array_agg(DISTINCT id), array_agg(seq) FILTER (WHERE seq IS NOT NULL) INTO gone, blamed
      FROM removed LEFT JOIN LATERAL unnest(running) AS r(seq) ON true;
    IF gone IS NULL THEN
        RETURN 0;
    END IF;
    UPDATE holdfast_work.partition SET owner = NULL, epoch = epoch + 1 WHERE owner = ANY (gone);
    UPDATE holdfast_work.job
       SET crashes = crashes + 1, attempt = attempt + 1, strikes = strikes + 1, reason = 99,
           error_type = 'ProcessDied', error = 'its worker died while it was running', failed_at = clock_timestamp(),
           reasons = holdfast_work.with_reason(reasons, 99::smallint)
     WHERE seq = ANY (blamed);
    SELECT array_agg(seq) INTO fatal FROM holdfast_work.job WHERE seq = ANY (blamed) AND crashes >= crashes_max;
    PERFORM holdfast_work.bury(fatal, 7::smallint);
    RETURN cardinality(gone);
END $$;

-- bury: move jobs to the dead letters, with a reason if given, and lift their blocks.
CREATE OR REPLACE FUNCTION holdfast_work.bury(doomed bigint[], because smallint DEFAULT NULL) RETURNS integer
LANGUAGE sql AS $$
    WITH removed AS (
        DELETE FROM holdfast_work.job WHERE seq = ANY (doomed) RETURNING *
    ), buried AS (
        INSERT INTO holdfast_work.dead SELECT removed.*, now() FROM removed RETURNING seq
    ), named AS (
        DELETE FROM holdfast_work.block WHERE head IN (SELECT seq FROM buried)
    )
    SELECT count(*)::integer FROM buried;
    UPDATE holdfast_work.dead SET reason = coalesce(because, reason), reasons = holdfast_work.with_reason(reasons, because)
     WHERE seq = ANY (doomed);
    SELECT count(*)::integer FROM holdfast_work.dead WHERE seq = ANY (doomed);
$$;

-- tell: the owners of these streams' partitions shall read everything again, at once if they sleep.
CREATE OR REPLACE FUNCTION holdfast_work.tell(changed smallint[]) RETURNS void
LANGUAGE sql AS $$
    WITH told AS (
        UPDATE holdfast_work.instance SET notice = true
         WHERE id IN (SELECT owner FROM holdfast_work.partition WHERE id = ANY (changed)) RETURNING id
    )
    SELECT pg_notify('holdfast_work', id::text) FROM told;
$$;
