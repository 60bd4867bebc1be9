-- What is added to the primary's timeline to make the epoch. The timeline of a cluster that was filled from a dump
-- begins at 1 again; the epoch must not.
ALTER TABLE holdfast_rules_head ADD COLUMN epoch_base bigint NOT NULL DEFAULT 0;
