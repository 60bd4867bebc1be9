-- What waits for one destination is counted, and its oldest jobs are found, without a look at the others.
CREATE INDEX job_destination ON job (destination, seq) WHERE destination <> '';
