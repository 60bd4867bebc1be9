-- A connection counts from the moment it opened, not from when its registration arrives. Nodes of the release before
-- do not say when.

-- connections: [[tenant, user, device, connection, since, opened], ...]; last: the highest time the caller was given.
-- Returns [[since, ...], [[gateway, connection], ...], [[tenant, user, at], ...]].
CREATE FUNCTION holdfast_cluster.registry_register_2(
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
        IF stamp = 0 AND (each->>5)::bigint < now_us AND coalesce(highest, 0) <= now_us THEN
            stamp := (each->>5)::bigint;
        END IF;
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

CREATE OR REPLACE FUNCTION holdfast_cluster.registry_register_1(
    caller text, connections jsonb, devices_max integer, last bigint, test_us bigint) RETURNS jsonb
LANGUAGE sql AS $$
    SELECT holdfast_cluster.registry_register_2(caller, connections, devices_max, last, test_us)
$$;
