-- Since when an endpoint is disabled: what is parked for it is kept for so long.
ALTER TABLE endpoint ADD COLUMN disabled_at TEXT NOT NULL DEFAULT '';
UPDATE endpoint SET disabled_at = strftime('%Y-%m-%dT%H:%M:%fZ', 'now') WHERE disabled <> '';
