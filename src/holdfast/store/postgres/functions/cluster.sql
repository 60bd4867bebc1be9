-- create_shards_1: once, when the schema is created.
CREATE OR REPLACE FUNCTION holdfast_chats.create_shards_1(shards smallint, of_system text, of_timeline bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO holdfast_chats.cluster (system, timeline, shards) VALUES (of_system, of_timeline, shards);
    FOR n IN 0 .. shards - 1 LOOP
        EXECUTE format('CREATE SEQUENCE holdfast_chats.position_%s INCREMENT 512', n);
        INSERT INTO holdfast_chats.shard (shard, positions) VALUES (n, format('holdfast_chats.position_%s', n)::regclass);
        INSERT INTO holdfast_chats.keys_forgotten (shard) VALUES (n);
    END LOOP;
END $$;

-- adopt_1: this database is served by another server, or by another life of it, than the one it names.
--
-- base_min: not null to raise all epochs: commits that clients have seen may be lost. The base rises at least to the
-- time and to base_min, which is above all that this node has seen: no epoch of the lost commits is given again.
-- was_first: whether this call did it.
CREATE OR REPLACE PROCEDURE holdfast_chats.adopt_1(
    seen_base bigint, seen_system text, seen_timeline bigint, of_system text, of_timeline bigint, base_min bigint,
    reason text, OUT new_base bigint, OUT was_first boolean
)
LANGUAGE plpgsql AS $$
DECLARE
    known holdfast_chats.cluster;
BEGIN
    SELECT * INTO STRICT known FROM holdfast_chats.cluster FOR UPDATE;
    was_first := (known.epoch_base, known.system, known.timeline) = (seen_base, seen_system, seen_timeline);
    new_base := known.epoch_base;
    IF was_first THEN
        IF base_min IS NOT NULL THEN
            new_base := greatest(known.epoch_base + 1, base_min, extract(epoch FROM clock_timestamp())::bigint);
            PERFORM FROM holdfast_chats.shard AS s ORDER BY s.shard FOR NO KEY UPDATE;
            INSERT INTO holdfast_chats.log_event (shard, position, kind, epoch, numbers, at)
            SELECT s.shard, nextval(s.positions), 'AllEpochsRaised', new_base, ARRAY[new_base], clock_timestamp()
              FROM holdfast_chats.shard AS s;
        END IF;
        UPDATE holdfast_chats.cluster SET system = of_system, timeline = of_timeline, epoch_base = new_base;
        PERFORM holdfast_chats.record_1(jsonb_build_object(
            'at', holdfast_chats.text_of_time(clock_timestamp()), 'actor', 'holdfast', 'action',
            CASE WHEN base_min IS NOT NULL THEN 'store.raise_epochs' ELSE 'store.failover' END, 'target', 'cluster',
            'reason', reason, 'details', json_build_object(
                'system', ARRAY[known.system, of_system], 'timeline', ARRAY[known.timeline, of_timeline],
                'base', ARRAY[known.epoch_base, new_base])::text));
    END IF;
    COMMIT;
END $$;
