-- Version 2: whose chat the event was of; empty if that could not be read.
ALTER TABLE holdfast_cluster.dead_letter
    ADD COLUMN tenant text NOT NULL DEFAULT '', ADD COLUMN chat_id text NOT NULL DEFAULT '';
