-- Schema version 8. Dead letters are counted by their reason without a look at them.
CREATE INDEX dead_reason ON holdfast_work.dead (reason);

UPDATE holdfast_work.version SET number = 8;
