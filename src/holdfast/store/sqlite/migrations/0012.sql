-- Version 12: events of the log that fanout could not use. fanout/dead_letters/sqlite reads and writes them.

CREATE TABLE dead_letters (
  number INTEGER PRIMARY KEY AUTOINCREMENT,
  shard INTEGER NOT NULL,
  log_offset INTEGER NOT NULL,
  reason TEXT NOT NULL,
  message TEXT NOT NULL,
  data BLOB NOT NULL,
  at TEXT NOT NULL,
  tenant TEXT NOT NULL,
  chat_id TEXT NOT NULL,
  UNIQUE (shard, log_offset, reason)
) STRICT;
