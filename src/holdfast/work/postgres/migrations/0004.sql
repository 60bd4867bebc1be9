-- Schema version 4. What waits for one destination is counted, and its oldest jobs are found, without a look at the others.
CREATE INDEX job_destination ON holdfast_work.job (destination, seq) WHERE destination <> '';

UPDATE holdfast_work.version SET number = 4;
