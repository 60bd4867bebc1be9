-- The highest version that a forgotten tombstone had: a name that comes again goes on above it.
ALTER TABLE holdfast_rules_head ADD COLUMN forgotten_version bigint NOT NULL DEFAULT 0;
