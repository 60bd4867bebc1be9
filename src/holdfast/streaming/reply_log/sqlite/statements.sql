-- name: log
SELECT log_id, epoch, last_n, ended FROM log WHERE reply_id = ?1 AND expires_at > ?2

-- name: begin
-- The first epoch of a log.
INSERT INTO log (reply_id, owner_tenant, owner_kind, owner_name, kind, epoch, last_n, ended, expires_at)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, 0, 0, ?7) RETURNING log_id

-- name: begin_again
UPDATE log SET epoch = ?2, last_n = 0, expires_at = ?3 WHERE log_id = ?1

-- name: grow
UPDATE log SET last_n = ?2 WHERE log_id = ?1

-- name: finish
UPDATE log SET last_n = ?2, ended = ?3, expires_at = ?4 WHERE log_id = ?1

-- name: add_entry
INSERT INTO entry VALUES (?1, ?2, ?3, ?4)

-- name: entries
SELECT epoch, n, stored FROM entry WHERE log_id = ?1 AND (epoch, n) > (?2, ?3) ORDER BY epoch, n LIMIT ?4

-- name: entry
SELECT stored FROM entry WHERE log_id = ?1 AND epoch = ?2 AND n = ?3

-- name: unfinished
-- Logs without their end, except those of assistants: their jobs begin a new epoch.
SELECT log_id, epoch, last_n FROM log WHERE ended = 0 AND kind <> 'assistant'

-- name: expired_logs
SELECT log_id FROM log WHERE expires_at <= ?1 LIMIT ?2

-- name: logs_of
SELECT log_id FROM log WHERE owner_tenant = ?1 AND owner_kind = ?2 AND owner_name = ?3

-- name: log_id
SELECT log_id FROM log WHERE reply_id = ?1

-- name: delete_entries
DELETE FROM entry WHERE log_id = ?1

-- name: delete_claims
DELETE FROM claim WHERE reply_id = (SELECT reply_id FROM log WHERE log_id = ?1)

-- name: delete_log
DELETE FROM log WHERE log_id = ?1

-- name: expire_claims
UPDATE claim SET expires_at = ?2 WHERE reply_id = ?1

-- name: delete_expired_claims
DELETE FROM claim WHERE expires_at <= ?1

-- name: free_claims_of_the_dead
-- A reply that is not done when its node has ended never will be.
DELETE FROM claim WHERE reply_id NOT IN (SELECT reply_id FROM log WHERE ended = 1)

-- name: claim
INSERT INTO claim VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8) ON CONFLICT DO UPDATE
   SET body_hash = excluded.body_hash, reply_id = excluded.reply_id, node = excluded.node,
       expires_at = excluded.expires_at
 WHERE expires_at <= ?9

-- name: claim_of
SELECT body_hash, reply_id, node FROM claim
 WHERE owner_tenant = ?1 AND owner_kind = ?2 AND owner_name = ?3 AND key = ?4

-- name: free
DELETE FROM claim
 WHERE owner_tenant = ?1 AND owner_kind = ?2 AND owner_name = ?3 AND key = ?4 AND reply_id = ?5

-- name: forget_claims
DELETE FROM claim WHERE owner_tenant = ?1 AND owner_kind = ?2 AND owner_name = ?3

-- name: note
INSERT INTO run VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, NULL) ON CONFLICT DO UPDATE
   SET model = excluded.model, provider = excluded.provider, prompt_tokens = excluded.prompt_tokens,
       completion_tokens = excluded.completion_tokens, estimated = excluded.estimated
 WHERE counted_at IS NULL

-- name: mark_counted
-- Changes no row if the run has counted. ?10 now
INSERT INTO run VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10) ON CONFLICT DO UPDATE
   SET counted_at = excluded.counted_at
 WHERE counted_at IS NULL

-- name: add_usage
INSERT INTO usage VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9) ON CONFLICT DO UPDATE
   SET replies = replies + excluded.replies, prompt_tokens = prompt_tokens + excluded.prompt_tokens,
       completion_tokens = completion_tokens + excluded.completion_tokens,
       estimated = estimated + excluded.estimated

-- name: left_runs
-- Runs that had not ended when the last process did.
SELECT run_id, day, tenant, user, model, provider, prompt_tokens, completion_tokens, estimated
  FROM run WHERE counted_at IS NULL

-- name: forget_counted
DELETE FROM run WHERE counted_at <= ?1

-- name: usage
SELECT day, tenant, user, model, provider, replies, prompt_tokens, completion_tokens, estimated FROM usage
 WHERE day BETWEEN ?1 AND ?2 AND (?3 = '' OR tenant = ?3) AND (?4 = '' OR user = ?4)
   AND (day, tenant, user, model, provider) > (?5, ?6, ?7, ?8, ?9)
 ORDER BY day, tenant, user, model, provider LIMIT ?10

-- name: usage_of
SELECT day, tenant, user, model, provider, replies, prompt_tokens, completion_tokens, estimated FROM usage
 WHERE tenant = ?1 AND user = ?2

-- name: forget_usage
DELETE FROM usage WHERE tenant = ?1 AND user = ?2

-- name: forget_runs
UPDATE run SET user = '' WHERE tenant = ?1 AND user = ?2
