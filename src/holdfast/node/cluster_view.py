"""All nodes of a cluster and what they share, as one of them sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from holdfast.api.deps import ClusterNode, ClusterNodeGone, ClusterStatus, RegistryView
from holdfast.drivers.cluster import ROLES
from holdfast.errors import HoldfastError
from holdfast.fanout.presence import PresenceReporter
from holdfast.fanout.registry.contract import Registry
from holdfast.message import User
from holdfast.node.cluster_record import replies_apart
from holdfast.settings import Settings
from holdfast.store.nodes.contract import (
    RENEW_SECONDS,
    DatabaseView,
    GoneNode,
    LivingNode,
    Nodes,
)

CALL_SECONDS_MAX = 1.0
LATE_SECONDS = 2 * RENEW_SECONDS
"""A node whose record is older hangs, or cannot reach PostgreSQL."""
_NOBODY = User("", "")


async def cluster_status(
    node_id: str,
    settings: Settings,
    nodes: Nodes,
    registry: Registry,
    reporter: PresenceReporter,
) -> ClusterStatus:
    """Never fails: what does not answer is among the ``problems``."""
    problems: list[str] = []
    try:
        async with asyncio.timeout(2 * CALL_SECONDS_MAX):
            living, database = await nodes.living(), await nodes.database()
            gone, leases = await nodes.gone(), await nodes.leases()
    except (HoldfastError, TimeoutError) as error:
        living, database, gone, leases = (), None, (), ()
        reason = str(error) or "no answer in time"
        problems.append(f"PostgreSQL does not answer ({reason}): no node is known")
    found = await _registry(settings, registry, reporter)
    if found.state != "up":
        problems.append(
            f"the registry ({found.engine}) is down: {found.detail}; presence, typing and"
            " receipts stay on their nodes"
        )
    problems += [
        f"{each.record.name} is gone since {each.since}: it was killed, hangs, or cannot reach"
        f" PostgreSQL; start it again at {each.record.address}"
        for each in gone
    ]
    differing = differing_settings(living)
    if living:
        problems += _problems(living, database, differing)
    if (apart := replies_apart(settings, living)) is not None:
        problems.append(apart)
    shown, lost = [_node(each) for each in living], [_gone(each) for each in gone]
    return ClusterStatus(node_id, shown, lost, differing, database, found, leases, problems)


async def _registry(
    settings: Settings, registry: Registry, reporter: PresenceReporter
) -> RegistryView:
    """As this node's own writes found it: a Redis that is full still answers reads. A
    node without the role gateway has only reads to go by.
    """
    cluster = settings.cluster
    engine = "redis" if cluster.redis else "postgres" if cluster.postgres else "memory"
    if "gateway" in settings.server.roles:
        trouble = reporter.registry_trouble
        return RegistryView(engine, "up" if trouble is None else "down", trouble or "")
    try:
        async with asyncio.timeout(CALL_SECONDS_MAX):
            await registry.gateways_of([_NOBODY])
    except (HoldfastError, TimeoutError) as error:
        return RegistryView(engine, "down", str(error) or "no answer in time")
    return RegistryView(engine, "up", "")


def _node(living: LivingNode) -> ClusterNode:
    record = living.record
    return ClusterNode(
        name=record.name,
        version=record.version,
        roles=record.roles,
        address=record.address,
        clients=record.clients,
        lag=record.lag,
        connections=record.connections,
        age_seconds=round(living.age_seconds, 1),
        settings_digest=record.digest,
    )


def _gone(gone: GoneNode) -> ClusterNodeGone:
    record, age_seconds = gone.record, round(gone.age_seconds, 1)
    return ClusterNodeGone(record.name, record.version, record.address, gone.since, age_seconds)


def differing_settings(living: Sequence[LivingNode]) -> dict[str, dict[str, str | None]]:
    """The settings that nodes should share and do not: their values by node, null where
    it is the default.
    """
    paths = sorted({path for each in living for path in each.record.settings})
    by_path = {
        path: {each.record.name: each.record.settings.get(path) for each in living}
        for path in paths
    }
    return {path: values for path, values in by_path.items() if len(set(values.values())) > 1}


def _problems(
    living: Sequence[LivingNode],
    database: DatabaseView | None,
    differing: Mapping[str, Mapping[str, str | None]],
) -> Iterator[str]:
    for each in living:
        if each.age_seconds > LATE_SECONDS:
            yield (
                f"{each.record.name} has not renewed its record for {each.age_seconds:.0f} s: it"
                " hangs, ended, or cannot reach PostgreSQL"
            )
    for role in ROLES:
        if not any(role in each.record.roles for each in living):
            yield f"no node has the role {role}"
    for path in differing:
        yield f"nodes differ in {path}"
    if database is None:
        return
    wanted, available = database.connections
    if wanted > available:
        yield (
            f"the nodes may take {wanted} connections of PostgreSQL, which has {available} for"
            " them: raise max_connections"
        )
    if database.failover == "lossless" and not database.standbys:
        yield (
            "cluster.failover is lossless and PostgreSQL names no synchronous standby: sends are"
            " refused until it does"
        )
