-- name: lock_writers
-- Until the end of the transaction: seq order is commit order. $1 lock
SELECT pg_advisory_xact_lock($1)

-- name: epoch
-- By the primary's timeline: a failover begins a new one. It never goes down, whatever cluster the tables came to.
SELECT greatest(epoch, epoch_base + line) FROM holdfast_rules_head,
       (SELECT ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::bigint AS line) AS primary_now

-- name: head
-- A primary knows all; a replica may lag behind by the age of the last beat it has.
SELECT epoch, seq, digest,
       CASE WHEN pg_is_in_recovery() THEN greatest(0, extract(epoch FROM clock_timestamp() - beat_at)) ELSE 0 END::float8,
       store
FROM holdfast_rules_head

-- name: move_head
-- $1 epoch, $2 seq, $3 digest
UPDATE holdfast_rules_head SET epoch = $1, seq = $2, digest = $3, beat_at = clock_timestamp()

-- name: beat
-- In a cluster whose timeline is lower than the tables are used to, the next failover still counts one up.
UPDATE holdfast_rules_head
SET epoch = greatest(epoch, epoch_base + line), epoch_base = greatest(epoch_base, epoch - line),
    beat_at = clock_timestamp()
FROM (SELECT ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::bigint AS line) AS primary_now

-- name: raise_epoch
-- $1 the least it may be: the same copy put back twice must not give one epoch twice
UPDATE holdfast_rules_head
SET epoch = greatest(epoch + 1, epoch_base + line + 1, $1),
    epoch_base = greatest(epoch + 1, epoch_base + line + 1, $1) - line
FROM (SELECT ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::bigint AS line) AS primary_now
RETURNING epoch

-- name: forgotten_version
SELECT forgotten_version FROM holdfast_rules_head

-- name: oldest_changes
-- $1 up to this seq, $2 limit
SELECT seq, body FROM holdfast_rule_changes WHERE seq <= $1 ORDER BY seq LIMIT $2

-- name: forget_changes
-- $1 up to this seq
DELETE FROM holdfast_rule_changes WHERE seq <= $1

-- name: forget_rule
-- $1 tenant, $2 resource
DELETE FROM holdfast_rules WHERE tenant = $1 AND resource = $2

-- name: raise_forgotten
-- $1 version, $2 digest
UPDATE holdfast_rules_head SET forgotten_version = greatest(forgotten_version, $1), digest = $2

-- name: rule
-- $1 tenant, $2 resource
SELECT body FROM holdfast_rules WHERE tenant = $1 AND resource = $2

-- name: rules_named
-- $1 tenant, $2 resources
SELECT body FROM holdfast_rules WHERE tenant = $1 AND resource = ANY($2::text[])

-- name: rules_of_names
-- $1 tenants, $2 resources
SELECT body FROM holdfast_rules
WHERE (tenant, resource) IN (SELECT * FROM unnest($1::text[], $2::text[]))

-- name: put_rule
-- $1 tenant, $2 resource, $3 deleted, $4 body
INSERT INTO holdfast_rules VALUES ($1, $2, $3, $4)
ON CONFLICT (tenant, resource) DO UPDATE SET deleted = excluded.deleted, body = excluded.body

-- name: append_change
-- $1 seq, $2 tenant, $3 resource, $4 version, $5 body
INSERT INTO holdfast_rule_changes VALUES ($1, $2, $3, $4, $5)

-- name: key
-- $1 key
SELECT body FROM holdfast_rule_keys WHERE key = $1

-- name: put_key
-- $1 key, $2 body
INSERT INTO holdfast_rule_keys VALUES ($1, now(), $2)

-- name: forget_keys
-- $1 days
DELETE FROM holdfast_rule_keys WHERE at < now() - $1::float8 * interval '1 day'

-- name: notify
-- $1 payload, below the 8,000 bytes above which NOTIFY fails the transaction
SELECT pg_notify('rule_changes', $1)

-- name: all_rules
SELECT body FROM holdfast_rules

-- name: page
-- Living rules after a name. $1 tenant or null for all, $2 tenant and $3 resource to go on after, $4 limit
SELECT body FROM holdfast_rules
WHERE NOT deleted AND ($1::text IS NULL OR tenant = $1) AND (tenant, resource) > ($2, $3)
ORDER BY tenant, resource LIMIT $4

-- name: changes_after
-- $1 seq, $2 limit
SELECT body FROM holdfast_rule_changes WHERE seq > $1 ORDER BY seq LIMIT $2

-- name: history
-- Newest first. $1 tenant, $2 resource, $3 below this version, $4 limit
SELECT body FROM holdfast_rule_changes
WHERE tenant = $1 AND resource = $2 AND version < $3 ORDER BY seq DESC LIMIT $4

-- name: try_lock
-- Of one node for all others, or for those of its region; the lock ends with its connection. $1 lock
SELECT pg_try_advisory_lock($1)

-- name: end_if_silent
-- $1 milliseconds
SELECT set_config('idle_session_timeout', $1, false)

-- name: schema_version
SELECT CASE WHEN to_regclass('holdfast_limits_schema') IS NULL THEN 0 ELSE 1 END

-- name: present_version
SELECT coalesce(max(version), 0) FROM holdfast_limits_schema
