-- Schema version 2. While some job types are shut, the retries of the others are found type by type; see process.sql.
CREATE INDEX job_due_by_type ON holdfast_work.job (type, due_at) WHERE state = 1;

UPDATE holdfast_work.version SET number = 2;
