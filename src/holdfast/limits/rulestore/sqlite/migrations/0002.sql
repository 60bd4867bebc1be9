-- The highest version that a forgotten tombstone had: a name that comes again goes on above it.
ALTER TABLE rules_head ADD COLUMN forgotten_version INTEGER NOT NULL DEFAULT 0;
