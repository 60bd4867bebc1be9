-- Tells this store of rules from every other: a doorbell may be shared by several.
ALTER TABLE rules_head ADD COLUMN store TEXT NOT NULL DEFAULT '';
UPDATE rules_head SET store = lower(hex(randomblob(16)));
