"""Labels of metrics are closed sets: never a user, a chat or a token."""

from __future__ import annotations

import re

from holdfast import telemetry


def test_labels_are_closed_sets() -> None:
    allowed = {
        "reason",
        "outcome",
        "answer",
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
