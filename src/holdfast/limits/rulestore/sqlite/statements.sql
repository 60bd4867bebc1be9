-- name: head
SELECT epoch, seq, digest, store FROM rules_head

-- name: move_head
-- ?1 seq, ?2 digest
UPDATE rules_head SET seq = ?1, digest = ?2

-- name: raise_epoch
-- ?1 the least it may be: the same backup restored twice must not give one epoch twice
UPDATE rules_head SET epoch = max(epoch + 1, ?1)

-- name: forgotten_version
SELECT forgotten_version FROM rules_head

-- name: oldest_changes
-- ?1 up to this seq, ?2 limit
SELECT seq, body FROM rule_changes WHERE seq <= ?1 ORDER BY seq LIMIT ?2

-- name: forget_changes
-- ?1 up to this seq
DELETE FROM rule_changes WHERE seq <= ?1

-- name: forget_rule
-- ?1 tenant, ?2 resource
DELETE FROM rules WHERE tenant = ?1 AND resource = ?2

-- name: raise_forgotten
-- ?1 version, ?2 digest
UPDATE rules_head SET forgotten_version = max(forgotten_version, ?1), digest = ?2

-- name: rule
-- ?1 tenant, ?2 resource
SELECT body FROM rules WHERE tenant = ?1 AND resource = ?2

-- name: rules_named
-- ?1 tenant, ?2 resources as a JSON list
SELECT body FROM rules WHERE tenant = ?1 AND resource IN (SELECT value FROM json_each(?2))

-- name: rules_of_names
-- ?1 names as a JSON list of [tenant, resource]
SELECT body FROM rules
WHERE (tenant, resource) IN (SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(?1))

-- name: put_rule
-- ?1 tenant, ?2 resource, ?3 deleted, ?4 body
INSERT INTO rules VALUES (?1, ?2, ?3, ?4)
ON CONFLICT (tenant, resource) DO UPDATE SET deleted = excluded.deleted, body = excluded.body

-- name: append_change
-- ?1 seq, ?2 tenant, ?3 resource, ?4 version, ?5 body
INSERT INTO rule_changes VALUES (?1, ?2, ?3, ?4, ?5)

-- name: key
-- ?1 key
SELECT body FROM rule_keys WHERE key = ?1

-- name: put_key
-- ?1 key, ?2 at, ?3 body
INSERT INTO rule_keys VALUES (?1, ?2, ?3)

-- name: forget_keys
-- ?1 older than
DELETE FROM rule_keys WHERE at < ?1

-- name: all_rules
SELECT body FROM rules

-- name: page
-- Living rules after a name. ?1 tenant or null for all, ?2 tenant and ?3 resource to go on after, ?4 limit
SELECT body FROM rules
WHERE NOT deleted AND (?1 IS NULL OR tenant = ?1) AND (tenant, resource) > (?2, ?3)
ORDER BY tenant, resource LIMIT ?4

-- name: changes_after
-- ?1 seq, ?2 limit
SELECT body FROM rule_changes WHERE seq > ?1 ORDER BY seq LIMIT ?2

-- name: history
-- Newest first. ?1 tenant, ?2 resource, ?3 below this version, ?4 limit
SELECT body FROM rule_changes WHERE tenant = ?1 AND resource = ?2 AND version < ?3 ORDER BY seq DESC LIMIT ?4
