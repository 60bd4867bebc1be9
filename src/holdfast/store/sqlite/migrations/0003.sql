-- Version 3: what was redacted or erased leaves no hash: whoever guesses the text could prove it by that.

UPDATE messages SET content_hash = NULL WHERE content = '' AND content_hash IS NOT NULL;
