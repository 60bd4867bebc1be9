-- Whose endpoints these are: made once, kept by backups. A shared store of jobs remembers it, see ``node/work.py``.
CREATE TABLE server (id TEXT NOT NULL) STRICT;
INSERT INTO server VALUES (lower(hex(randomblob(16))));

-- Endpoints that were here: their jobs are over. A job of an endpoint that never was here is not.
CREATE TABLE removed (endpoint_id TEXT PRIMARY KEY) STRICT, WITHOUT ROWID;
