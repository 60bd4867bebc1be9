-- Leases: see store/leases/contract.py. Each commits by itself, so a node that is cut off holds no lease's row. They
-- end by this server's clock, read after the row is locked.

-- lease_acquire_1: `number` is null if somebody holds it.
CREATE OR REPLACE PROCEDURE holdfast_chats.lease_acquire_1(
    in_name text, in_holder text, in_seconds double precision, OUT base bigint, OUT number bigint
)
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO holdfast_chats.lease AS l
    VALUES (in_name, in_holder, 1, clock_timestamp() + make_interval(secs => in_seconds))
    ON CONFLICT (name) DO UPDATE SET
        holder = in_holder, number = l.number + 1, expires_at = clock_timestamp() + make_interval(secs => in_seconds)
     WHERE l.expires_at <= clock_timestamp()
    RETURNING l.number INTO number;
    SELECT c.epoch_base INTO base FROM holdfast_chats.cluster AS c;
    COMMIT;
END $$;

-- lease_renew_1: until `in_seconds` from now; 0 ends it. A base that rose since ended it too.
CREATE OR REPLACE PROCEDURE holdfast_chats.lease_renew_1(
    in_name text, in_base bigint, in_number bigint, in_seconds double precision, OUT is_held boolean
)
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE holdfast_chats.lease AS l SET expires_at = clock_timestamp() + make_interval(secs => in_seconds)
     WHERE l.name = in_name AND l.number = in_number AND l.expires_at > clock_timestamp()
       AND in_base = (SELECT c.epoch_base FROM holdfast_chats.cluster AS c);
    is_held := FOUND;
    COMMIT;
END $$;
