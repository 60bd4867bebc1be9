-- Node records: see store/nodes/contract.py. Ages are by this server's clock; one that went back makes no node older.

-- node_connections_1: of this server, for nodes.
CREATE OR REPLACE FUNCTION holdfast_chats.node_connections_1() RETURNS integer LANGUAGE sql STABLE AS $$
    SELECT current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer
         - coalesce(current_setting('reserved_connections', true), '0')::integer
$$;

-- node_renew_1: wanted is the sum over all nodes that live. A node that starts is not recorded if that is too many: nodes
-- that start together take turns.
CREATE OR REPLACE PROCEDURE holdfast_chats.node_renew_1(
    in_name text, in_record text, in_connections integer, in_live double precision, is_start boolean,
    OUT wanted integer, OUT available integer
)
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(7525060110206892804);
    IF is_start THEN
        DELETE FROM holdfast_chats.node AS n WHERE n.renewed_at < clock_timestamp() - interval '1 day';
    END IF;
    available := holdfast_chats.node_connections_1();
    SELECT in_connections + coalesce(sum(n.connections), 0) INTO wanted FROM holdfast_chats.node AS n
     WHERE n.name <> in_name AND abs(extract(epoch FROM clock_timestamp() - n.renewed_at)) < in_live;
    IF NOT is_start OR wanted <= available THEN
        INSERT INTO holdfast_chats.node VALUES (in_name, clock_timestamp(), in_connections, in_record)
        ON CONFLICT (name) DO UPDATE SET
            renewed_at = excluded.renewed_at, connections = excluded.connections, record = excluded.record;
    END IF;
    COMMIT;
END $$;

CREATE OR REPLACE PROCEDURE holdfast_chats.node_leave_1(in_name text)
LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM holdfast_chats.node AS n WHERE n.name = in_name;
    COMMIT;
END $$;
