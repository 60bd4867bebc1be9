-- Version 7: a mute outlives the membership. So mutes stand beside the members, as bans do.

CREATE TABLE mutes (
  chat        INTEGER NOT NULL,
  user_id     TEXT NOT NULL,
  by_operator INTEGER NOT NULL CHECK (by_operator IN (0, 1)),
  PRIMARY KEY (chat, user_id)
) STRICT, WITHOUT ROWID;

INSERT INTO mutes SELECT chat, user_id, muted_by_operator FROM members WHERE muted;
ALTER TABLE members DROP COLUMN muted_by_operator;
ALTER TABLE members DROP COLUMN muted;

CREATE VIEW member_values AS
SELECT m.chat, m.user_id,
       json_object('user_id', m.user_id, 'role', m.role, 'joined_at', m.joined_at,
                   'muted', json(iif(q.chat IS NULL, 'false', 'true')),
                   'muted_by_operator', json(iif(q.by_operator, 'true', 'false'))) AS value
FROM members AS m LEFT JOIN mutes AS q ON q.chat = m.chat AND q.user_id = m.user_id;
