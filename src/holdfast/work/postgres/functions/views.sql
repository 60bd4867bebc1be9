-- The seed's tables as read-only views. `status` is progress with the Failed bit (32768) where the last run failed;
-- `scheduled_for` is when a failed job is tried again.
--
-- A payload is bytes; one that is no text is shown escaped, so that a single job cannot make the views unreadable.
CREATE OR REPLACE FUNCTION holdfast_work.as_text(payload bytea) RETURNS text
LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
    RETURN convert_from(payload, 'UTF8');
EXCEPTION WHEN character_not_in_repertoire OR untranslatable_character THEN
    RETURN encode(payload, 'escape');
END $$;

CREATE OR REPLACE VIEW holdfast_work.wh_work AS
SELECT job.seq::text AS message_id, job.stream AS stream_id, job.destination, job.type AS event_type,
       holdfast_work.as_text(job.payload) AS event_data,
       job.stages | CASE WHEN job.state IN (1, 3) AND job.reason IS NOT NULL THEN 32768 ELSE 0 END AS status,
       job.attempt AS attempts, job.error, job.reason AS failure_reason,
       CASE WHEN job.state = 1 THEN job.due_at END AS scheduled_for,
       instance.name AS instance_id, instance.beat_at + interval '20 seconds' AS lease_expiry,
       job.created_at, job.source, job.source_id
  FROM holdfast_work.job LEFT JOIN holdfast_work.instance ON job.seq = ANY (instance.running);

CREATE OR REPLACE VIEW holdfast_work.wh_outbox AS SELECT * FROM holdfast_work.wh_work WHERE source IS NULL;
CREATE OR REPLACE VIEW holdfast_work.wh_inbox AS SELECT * FROM holdfast_work.wh_work WHERE source IS NOT NULL;
