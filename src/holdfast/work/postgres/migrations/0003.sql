-- Schema version 3. Nothing but functions: producers lock streams, not lanes; see functions/locks.sql.
UPDATE holdfast_work.version SET number = 3;
