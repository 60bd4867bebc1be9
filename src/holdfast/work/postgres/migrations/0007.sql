-- Schema version 7. The functions are made again: a suspect that failed without a death runs beside others again.
UPDATE holdfast_work.version SET number = 7;
