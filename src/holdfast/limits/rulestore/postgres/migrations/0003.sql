-- Tells this store of rules from every other: a doorbell may be shared by several.
ALTER TABLE holdfast_rules_head ADD COLUMN store text NOT NULL DEFAULT '';
UPDATE holdfast_rules_head SET store = replace(gen_random_uuid()::text, '-', '');
