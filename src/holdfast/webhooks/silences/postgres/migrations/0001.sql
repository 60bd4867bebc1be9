-- Alerts that no node reports until then. One row for an alert, so there are never more than alerts.
CREATE TABLE holdfast_cluster.silence (
    alert   text PRIMARY KEY,
    until   text NOT NULL,
    reason  text NOT NULL,
    made_by text NOT NULL
);
