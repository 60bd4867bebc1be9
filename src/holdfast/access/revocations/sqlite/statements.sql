-- name: forget_ended
DELETE FROM revocations WHERE ends_at <= :now;

-- name: by_key
SELECT kind, tenant, user_id, item, issued_before, made_at, ends_at, number FROM revocations
WHERE kind = :kind AND tenant = :tenant AND about = :user_id AND item = :item;

-- name: count
SELECT count(*) FROM revocations;

-- name: add
INSERT INTO revocations (kind, tenant, about, user_id, item, issued_before, made_at, ends_at)
VALUES (:kind, :tenant, :about, :user_id, :item, :issued_before, :made_at, :ends_at) RETURNING number;

-- name: replace
UPDATE revocations SET user_id = :user_id, issued_before = :issued_before, made_at = :made_at, ends_at = :ends_at
WHERE number = :number;

-- name: remove
DELETE FROM revocations WHERE number = :number
RETURNING kind, tenant, user_id, item, issued_before, made_at, ends_at, number;

-- name: all
SELECT kind, tenant, user_id, item, issued_before, made_at, ends_at, number FROM revocations
WHERE ends_at IS NULL OR ends_at > :now ORDER BY number;

-- name: changed
UPDATE version SET value = value + 1 WHERE one = 1;

-- name: version
SELECT value FROM version WHERE one = 1;
