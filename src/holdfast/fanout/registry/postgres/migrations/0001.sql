-- The registry, for a cluster without Redis. Unlogged: a crash or a failover empties the tables, which the gateways
-- notice and repair. Times are the server's, in microseconds. contract.py has the theory, memory.py is the reference.

CREATE UNLOGGED TABLE holdfast_cluster.gateway (
    name       text COLLATE "C" PRIMARY KEY,
    renewed_at bigint NOT NULL,
    changes    bigint NOT NULL DEFAULT 0,
    record     text
) WITH (fillfactor = 50);

CREATE UNLOGGED TABLE holdfast_cluster.device (
    tenant        text COLLATE "C" NOT NULL,
    user_id       text COLLATE "C" NOT NULL,
    device_id     text COLLATE "C" NOT NULL,
    gateway       text COLLATE "C" NOT NULL,
    connection_id text COLLATE "C" NOT NULL,
    since         bigint NOT NULL,
    PRIMARY KEY (tenant, user_id, device_id)
);
CREATE INDEX device_by_gateway ON holdfast_cluster.device (gateway);

CREATE UNLOGGED TABLE holdfast_cluster.displaced (
    gateway       text COLLATE "C" NOT NULL,
    connection_id text COLLATE "C" NOT NULL,
    PRIMARY KEY (gateway, connection_id)
);

-- One writer at a time, as in Redis: the answers are those of a whole registry. It ends with the transaction, which
-- does not wait for the disk: a crash empties the tables anyway.
CREATE FUNCTION holdfast_cluster.registry_begin_1(now_us bigint) RETURNS bigint
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_catalog.set_config('synchronous_commit', 'off', true);
    PERFORM pg_catalog.pg_advisory_xact_lock(7525060110206892802);
    RETURN coalesce(now_us, (extract(epoch FROM pg_catalog.clock_timestamp()) * 1000000)::bigint);
END $$;

CREATE FUNCTION holdfast_cluster.registry_change_1(caller text, now_us bigint) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO holdfast_cluster.gateway AS g (name, renewed_at, changes) VALUES (caller, now_us, 1)
    ON CONFLICT (name) DO UPDATE SET renewed_at = now_us, changes = g.changes + 1
$$;

CREATE FUNCTION holdfast_cluster.registry_displace_1(of_gateway text, connection text) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO holdfast_cluster.displaced
    SELECT of_gateway, connection FROM holdfast_cluster.gateway WHERE name = of_gateway
    ON CONFLICT DO NOTHING
$$;

-- connections: [[tenant, user, device, connection, since], ...]; last: the highest time the caller was given.
-- Returns [[since, ...], [[gateway, connection], ...], [[tenant, user, at], ...]].
CREATE FUNCTION holdfast_cluster.registry_register_1(
    caller text, connections jsonb, devices_max integer, last bigint, test_us bigint) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    now_us    bigint := holdfast_cluster.registry_begin_1(test_us);
    each      jsonb;
    old       holdfast_cluster.device;
    gone      holdfast_cluster.device;
    stamp     bigint;
    highest   bigint;
    stamps    jsonb := '[]';
    displaced jsonb := '[]';
    online    jsonb := '[]';
BEGIN
    PERFORM holdfast_cluster.registry_change_1(caller, now_us);
    FOR each IN SELECT value FROM jsonb_array_elements(connections) LOOP
        SELECT max(since) INTO highest FROM holdfast_cluster.device
        WHERE tenant = each->>0 AND user_id = each->>1;
        stamp := (each->>4)::bigint;
        last := greatest(last, highest);
        IF stamp = 0 THEN
            last := greatest(now_us, last + 1);
            stamp := last;
        END IF;
        last := greatest(last, stamp);
        IF highest IS NULL THEN
            last := greatest(now_us, last + 1);
            online := online || jsonb_build_array(jsonb_build_array(each->0, each->1, last));
        END IF;
        SELECT * INTO old FROM holdfast_cluster.device
        WHERE tenant = each->>0 AND user_id = each->>1 AND device_id = each->>2;
        IF old.connection_id = each->>3 THEN
            stamp := greatest(stamp, old.since);
            UPDATE holdfast_cluster.device SET since = stamp
            WHERE tenant = each->>0 AND user_id = each->>1 AND device_id = each->>2 AND since <> stamp;
        ELSIF old.since > stamp THEN
            PERFORM holdfast_cluster.registry_displace_1(caller, each->>3);
            displaced := displaced || jsonb_build_array(jsonb_build_array(caller, each->3));
        ELSE
            INSERT INTO holdfast_cluster.device
            VALUES (each->>0, each->>1, each->>2, caller, each->>3, stamp)
            ON CONFLICT (tenant, user_id, device_id) DO UPDATE
            SET gateway = excluded.gateway, connection_id = excluded.connection_id, since = excluded.since;
            IF old.connection_id IS NOT NULL THEN
                PERFORM holdfast_cluster.registry_displace_1(old.gateway, old.connection_id);
                displaced := displaced || jsonb_build_array(jsonb_build_array(old.gateway, old.connection_id));
            END IF;
            FOR gone IN
                DELETE FROM holdfast_cluster.device WHERE (tenant, user_id, device_id) IN (
                    SELECT tenant, user_id, device_id FROM holdfast_cluster.device
                    WHERE tenant = each->>0 AND user_id = each->>1 ORDER BY since DESC OFFSET devices_max)
                RETURNING *
            LOOP
                PERFORM holdfast_cluster.registry_displace_1(gone.gateway, gone.connection_id);
                displaced := displaced || jsonb_build_array(jsonb_build_array(gone.gateway, gone.connection_id));
            END LOOP;
        END IF;
        stamps := stamps || to_jsonb(stamp);
    END LOOP;
    RETURN jsonb_build_array(stamps, displaced, online);
END $$;

-- connections: [[tenant, user, device, connection], ...]. Returns [[tenant, user, at], ...].
CREATE FUNCTION holdfast_cluster.registry_unregister_1(caller text, connections jsonb, last bigint, test_us bigint)
RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    now_us  bigint := holdfast_cluster.registry_begin_1(test_us);
    each    jsonb;
    ended   bigint;
    offline jsonb := '[]';
BEGIN
    PERFORM holdfast_cluster.registry_change_1(caller, now_us);
    FOR each IN SELECT value FROM jsonb_array_elements(connections) LOOP
        DELETE FROM holdfast_cluster.displaced WHERE gateway = caller AND connection_id = each->>3;
        DELETE FROM holdfast_cluster.device
        WHERE tenant = each->>0 AND user_id = each->>1 AND device_id = each->>2
            AND gateway = caller AND connection_id = each->>3
        RETURNING since INTO ended;
        IF NOT EXISTS (SELECT FROM holdfast_cluster.device WHERE tenant = each->>0 AND user_id = each->>1) THEN
            last := greatest(now_us, last + 1, ended + 1);
            offline := offline || jsonb_build_array(jsonb_build_array(each->0, each->1, last));
        END IF;
    END LOOP;
    RETURN offline;
END $$;

-- Returns [changes, [connection, ...], gateways that live, at].
CREATE FUNCTION holdfast_cluster.registry_renew_1(
    caller text, new_record text, live bigint, last bigint, test_us bigint) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    now_us bigint := holdfast_cluster.registry_begin_1(test_us);
    counted bigint;
BEGIN
    INSERT INTO holdfast_cluster.gateway AS g (name, renewed_at, record) VALUES (caller, now_us, new_record)
    ON CONFLICT (name) DO UPDATE SET renewed_at = now_us, record = new_record,
        changes = CASE WHEN now_us - g.renewed_at < live THEN g.changes ELSE 0 END
    RETURNING changes INTO counted;
    RETURN jsonb_build_array(counted,
        coalesce((SELECT jsonb_agg(connection_id) FROM holdfast_cluster.displaced WHERE gateway = caller), '[]'),
        (SELECT count(*) FROM holdfast_cluster.gateway WHERE now_us - renewed_at < live),
        greatest(now_us, last + 1));
END $$;

-- Removes this gateway, or the dead ones if it is null. Returns [[tenant, user, at], ...].
-- A renewal in the future is one by a clock that has gone back since: it counts from now on.
CREATE FUNCTION holdfast_cluster.registry_drop_1(one text, live bigint, last bigint, test_us bigint) RETURNS jsonb
LANGUAGE plpgsql AS $$
DECLARE
    now_us bigint := holdfast_cluster.registry_begin_1(test_us);
    names  text[];
    answer jsonb;
BEGIN
    UPDATE holdfast_cluster.gateway SET renewed_at = now_us WHERE renewed_at > now_us;
    WITH dropped AS (
        DELETE FROM holdfast_cluster.gateway
        WHERE CASE WHEN one IS NULL THEN now_us - renewed_at >= live ELSE name = one END RETURNING name)
    SELECT array_agg(name) INTO names FROM dropped;
    DELETE FROM holdfast_cluster.displaced WHERE gateway = ANY (names);
    WITH ended AS (
        DELETE FROM holdfast_cluster.device WHERE gateway = ANY (names) RETURNING tenant, user_id, since)
    SELECT coalesce(jsonb_agg(jsonb_build_array(tenant, user_id, greatest(now_us, last + 1, ended_at + 1))), '[]')
    INTO answer
    FROM (SELECT tenant, user_id, max(since) AS ended_at FROM ended GROUP BY tenant, user_id) AS users
    WHERE NOT EXISTS (SELECT FROM holdfast_cluster.device AS left_over
                      WHERE (left_over.tenant, left_over.user_id) = (users.tenant, users.user_id)
                          AND left_over.gateway <> ALL (names));
    RETURN answer;
END $$;
