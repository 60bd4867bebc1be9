-- Version 10: an audit record has an id that is unique among nodes, and continues the hash chain of its node.

ALTER TABLE audit ADD COLUMN record_id TEXT NOT NULL DEFAULT '';
ALTER TABLE audit ADD COLUMN node TEXT NOT NULL DEFAULT '';
ALTER TABLE audit ADD COLUMN hash TEXT NOT NULL DEFAULT '';
CREATE INDEX audit_by_node ON audit (node, number);
