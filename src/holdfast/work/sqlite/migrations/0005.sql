-- Dead letters are counted by their reason without a look at them.
CREATE INDEX dead_reason ON dead (reason);
