"""Which dependency of which role makes a node unready."""

from __future__ import annotations

import pytest

from holdfast.drivers.cluster import ROLES
from holdfast.node.readiness import is_ready

UP = dict.fromkeys(("store", "store_reads", "jobs", "registry", "replies", "counters"), "up")


@pytest.mark.parametrize(
    ("roles", "needed"),
    [
        (ROLES, {"store", "store_reads"}),
        (("gateway", "ingest"), {"store", "store_reads"}),
        (("admin",), {"store", "store_reads"}),
        (("streaming",), set()),
        (("work",), {"jobs"}),
        (("work", "streaming"), set()),
    ],
)
def test_node_is_unready_without_what_its_roles_need(
    roles: tuple[str, ...], needed: set[str]
) -> None:
    assert is_ready(roles, UP)
    for name in UP:
        for state in ("down", "open"):
            assert is_ready(roles, {**UP, name: state}) == (name not in needed)
    assert not is_ready(roles, {**UP, "gateway": "draining"})
