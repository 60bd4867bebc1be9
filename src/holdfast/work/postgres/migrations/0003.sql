-- Schema version 3. Producers lock streams, not lanes (functions/locks.sql), and may be roles that can do nothing but
-- enqueue: so what they give must not be able to stop the workers, who look a job's partition up in 256 bits.
ALTER TABLE holdfast_work.job ADD CONSTRAINT job_partition CHECK (partition BETWEEN 0 AND 255) NOT VALID;

UPDATE holdfast_work.version SET number = 3;
