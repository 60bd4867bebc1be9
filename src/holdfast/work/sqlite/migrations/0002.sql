-- While some job types are shut, the retries of the others are found type by type.
CREATE INDEX job_due_by_type ON job (type, due_at) WHERE state = 1;
