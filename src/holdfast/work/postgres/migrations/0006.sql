-- Schema version 6. The functions are made again: who waits for a whole lane is told so.
UPDATE holdfast_work.version SET number = 6;
