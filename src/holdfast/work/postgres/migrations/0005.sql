-- Schema version 5. Every reason a job failed with, in order; NULL while it has not failed. In the dead letters it stands
-- before dead_at, so that they have the columns of a job and one more.
ALTER TABLE holdfast_work.job ADD COLUMN reasons smallint[];
ALTER TABLE holdfast_work.dead ADD COLUMN reasons smallint[];
ALTER TABLE holdfast_work.dead RENAME COLUMN dead_at TO died_at;
ALTER TABLE holdfast_work.dead ADD COLUMN dead_at timestamptz NOT NULL DEFAULT now();
UPDATE holdfast_work.dead SET dead_at = died_at, reasons = array_remove(ARRAY[reason], NULL);
ALTER TABLE holdfast_work.dead DROP COLUMN died_at;
UPDATE holdfast_work.job SET reasons = ARRAY[reason] WHERE reason IS NOT NULL;

UPDATE holdfast_work.version SET number = 5;
