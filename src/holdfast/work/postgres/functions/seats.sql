-- bury_dead: workers without a beat for `dead_after` seconds lose their lease. Their partitions become free with a
-- higher epoch. A death is laid to the suspects in flight, which have a crash already, else to all that was in flight:
-- they get a crash, but neither an attempt nor a strike, and are buried as poison at `crashes_max`.
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
    SELECT array_agg(DISTINCT id), array_agg(seq) FILTER (WHERE crashes > 0 OR most = 0) INTO gone, blamed
      FROM removed LEFT JOIN LATERAL (SELECT seq, crashes, max(crashes) OVER () AS most
                                        FROM holdfast_work.job WHERE seq = ANY (running)) AS in_flight ON true;
    IF gone IS NULL THEN
        RETURN 0;
    END IF;
    UPDATE holdfast_work.partition SET owner = NULL, epoch = epoch + 1 WHERE owner = ANY (gone);
    -- A failure of its own says more than that somebody died; but of poison everything is said.
    UPDATE holdfast_work.job AS j
       SET crashes = j.crashes + 1, reason = coalesce(j.reason, 99), failed_at = coalesce(j.failed_at, clock_timestamp()),
           error_type = CASE WHEN j.crashes + 1 >= crashes_max THEN 'ProcessDied' ELSE coalesce(j.error_type, 'ProcessDied') END,
           error = CASE WHEN j.crashes + 1 < crashes_max THEN coalesce(j.error, 'its worker died while it was in flight')
                        ELSE 'its worker died ' || crashes_max || ' times while it was in flight'
                             || CASE WHEN j.error_type <> 'ProcessDied'
                                     THEN left('; before that: ' || j.error_type || ': ' || coalesce(j.error, ''), 1000) ELSE '' END END,
           reasons = holdfast_work.with_reason(j.reasons, 99::smallint)
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
