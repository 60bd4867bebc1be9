-- Version 2: an answer kept under an idempotency key has an age, and so can be forgotten; so can the key of a message.

ALTER TABLE answers ADD COLUMN at TEXT NOT NULL DEFAULT '';
UPDATE answers SET at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now');  -- nobody knows when; from now on, then
CREATE INDEX answers_by_age ON answers (at);

-- Up to which position messages have lost their keys, so that nobody looks for them again.
CREATE TABLE keys_forgotten (
  one     INTEGER PRIMARY KEY CHECK (one = 1),
  through INTEGER NOT NULL
) STRICT;
INSERT INTO keys_forgotten VALUES (1, 0);
