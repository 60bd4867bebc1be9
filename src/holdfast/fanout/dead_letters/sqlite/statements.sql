-- name: put
-- No row if this event is there for this reason.
INSERT INTO dead_letters (shard, log_offset, reason, message, data, at, tenant, chat_id)
VALUES (:shard, :offset, :reason, :message, :data, :at, :tenant, :chat_id)
ON CONFLICT DO NOTHING RETURNING number;

-- name: trim
-- Of those there are, the newest :kept stay.
DELETE FROM dead_letters WHERE number <= (
  SELECT number FROM dead_letters ORDER BY number DESC LIMIT 1 OFFSET :kept);

-- name: count
SELECT count(*) FROM dead_letters;

-- name: counts
SELECT reason, count(*) FROM dead_letters GROUP BY reason;

-- name: read
SELECT shard, log_offset, reason, message, data, at, tenant, chat_id, number FROM dead_letters
WHERE number < :before ORDER BY number DESC LIMIT :limit;

-- name: get
SELECT shard, log_offset, reason, message, data, at, tenant, chat_id, number FROM dead_letters
WHERE number = :number;

-- name: remove
DELETE FROM dead_letters WHERE number IN (SELECT value FROM json_each(:numbers)) RETURNING number;

-- name: forget_user
UPDATE dead_letters SET data = x'' WHERE instr(data, :name) > 0;
