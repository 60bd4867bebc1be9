-- name: add
INSERT INTO endpoint VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)

-- name: get
SELECT endpoint_id, tenant, url, secret, description, created_at, disabled, disabled_at FROM endpoint
 WHERE endpoint_id = ?1

-- name: all
SELECT endpoint_id, tenant, url, secret, description, created_at, disabled, disabled_at FROM endpoint
 ORDER BY created_at, endpoint_id

-- name: disable
UPDATE endpoint SET disabled = ?2, disabled_at = CASE WHEN disabled = '' THEN ?3 ELSE disabled_at END
 WHERE endpoint_id = ?1

-- name: enable
UPDATE endpoint SET disabled = '', disabled_at = '' WHERE endpoint_id = ?1

-- name: remove
DELETE FROM endpoint WHERE endpoint_id = ?1

-- name: bury
INSERT INTO removed SELECT endpoint_id FROM endpoint WHERE endpoint_id = ?1

-- name: removed
SELECT count(*) FROM removed WHERE endpoint_id = ?1

-- name: server
SELECT id FROM server

-- name: forget
DELETE FROM delivery WHERE endpoint_id = ?1

-- name: log
INSERT INTO delivery (endpoint_id, webhook_id, chat_id, sequence, attempt, at, status, seconds, error)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)

-- name: trim
-- Keep the last deliveries of an endpoint. ?1 endpoint, ?2 how many
DELETE FROM delivery WHERE endpoint_id = ?1 AND number <= (
    SELECT number FROM delivery WHERE endpoint_id = ?1 ORDER BY number DESC LIMIT 1 OFFSET ?2)

-- name: deliveries
SELECT endpoint_id, webhook_id, chat_id, sequence, attempt, at, status, seconds, error FROM delivery
 WHERE endpoint_id = ?1 ORDER BY number DESC LIMIT ?2

-- name: last_seconds
SELECT endpoint_id, seconds FROM endpoint JOIN delivery USING (endpoint_id)
 WHERE number = (SELECT max(number) FROM delivery WHERE delivery.endpoint_id = endpoint.endpoint_id)
