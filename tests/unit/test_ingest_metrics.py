"""Every metric that the messaging seeds name exists, and says by which of their names
it goes.
"""

from __future__ import annotations

import re

import pytest

from holdfast import telemetry

SEED_NAMES = [
    "gateway.connection.timeout",
    "gateway.slow_consumer.disconnects",
    "durability.dynamodb.throttle_count",
    "durability.transaction.conflict_rate",
    "durability.dynamodb.available",
    "durability.kafka.available",
    "gateway.redis.connection_errors",
    "gateway.redis.available",
    "gateway.instances.healthy",
    "durability.counter.corruption",
    "durability.idempotency.hit_rate",
    "durability.duplicate.sequence",
    "gateway.circuit_breaker.open",
    "durability.persist.latency_p99",
    "fanout.kafka.consumer_lag",
    "fanout.delivery.skip_rate",
    "gateway.connections.active",
    "gateway.connections.rate",
    "durability.messages.persisted_rate",
    "fanout.messages.delivered_rate",
    "client.resync.forced_rate",
    "fanout.retry.count",
    "fanout.dlq.depth",
    "fanout.consumer.restarts",
    "sequence_allocation_latency_p99",
    "sequence_allocation_errors",
    "counter_missing_errors",
    "idempotency_hit_rate",
    "sequence_gap_rate",
    "transaction_conflict_rate",
    "messages_per_chat_per_minute",
]
"""The tables of 000 (taxonomy, tiers, 3.1) and 001 (section 12).
``durability.kafka.produce_latency_p99`` comes with the relay: without a log of its own
nothing is produced.
"""


@pytest.mark.parametrize("name", SEED_NAMES)
def test_a_seed_name_leads_to_its_metric(name: str) -> None:
    named = [m.name for m in telemetry.REGISTRY.collect() if f"[{name}]" in m.documentation]
    assert len(named) == 1, f"{name}: {named}"


def test_labels_are_closed_sets() -> None:
    allowed = {
        "reason",
        "outcome",
        "dependency",
        "state",
        "ended",
        "kind",
        "sign",
        "status",
        "part",
        "le",
    }
    for family in telemetry.REGISTRY.collect():
        assert re.fullmatch(r"holdfast_[a-z0-9_]+", family.name)
        for sample in family.samples:
            assert not {"user", "user_id", "chat", "chat_id", "token", "device_id"} & set(
                sample.labels
            ), family.name
            if family.name.startswith(
                ("holdfast_ingest", "holdfast_durability", "holdfast_fanout")
            ):
                assert set(sample.labels) <= allowed, family.name
