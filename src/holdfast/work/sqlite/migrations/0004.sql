-- Every reason a job failed with, in order, as a JSON array; NULL while it has not failed.
ALTER TABLE job ADD COLUMN reasons TEXT;
ALTER TABLE dead ADD COLUMN reasons TEXT;
UPDATE job SET reasons = json_array(reason) WHERE reason IS NOT NULL;
UPDATE dead SET reasons = json_array(reason) WHERE reason IS NOT NULL;
