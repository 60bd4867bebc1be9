-- Version 6: bans and mutes know whether an operator made them: then only an operator lifts them.
-- Those from before count as made by the chat's own people.

ALTER TABLE members ADD COLUMN muted_by_operator INTEGER NOT NULL DEFAULT 0 CHECK (muted_by_operator IN (0, 1));
ALTER TABLE bans ADD COLUMN by_operator INTEGER NOT NULL DEFAULT 0 CHECK (by_operator IN (0, 1));
