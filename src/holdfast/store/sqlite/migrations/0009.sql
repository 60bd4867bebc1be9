-- Version 9: a key that a request has taken names the node that runs it, and until when at most.

ALTER TABLE answers ADD COLUMN node TEXT NOT NULL DEFAULT '';
ALTER TABLE answers ADD COLUMN until TEXT NOT NULL DEFAULT '';
