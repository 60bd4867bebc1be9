"""Whether a node can serve: what each role needs. (Pure.)

Everything else that fails is shown and costs less than a node: limits go on by shares,
jobs wait, presence is stale, replies cannot be resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_NEEDS: Mapping[str, tuple[str, ...]] = {
    "gateway": ("store", "store_reads"),
    "ingest": ("store", "store_reads"),
    "admin": ("store", "store_reads"),
    "streaming": (),
    "work": (),
}


def is_ready(roles: Sequence[str], dependencies: Mapping[str, str]) -> bool:
    """``dependencies``: each one's state. A node that only runs jobs needs the job
    store; nobody sends it requests, so this is all that its readiness can say.
    """
    needed = {name for role in roles for name in _NEEDS[role]}
    if tuple(roles) == ("work",):
        needed = {"jobs"}
    return dependencies.get("gateway", "up") == "up" and all(
        dependencies[name] == "up" for name in needed
    )
