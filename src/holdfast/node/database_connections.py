"""How many connections of the cluster's PostgreSQL a node may take. (Pure: values.)

Each part opens its connections when it needs them; these are the most it opens.
"""

from __future__ import annotations

from holdfast.limits.composition import RULES_CONNECTIONS_MAX
from holdfast.settings import Settings

LEASES = 1
RECORD = 1
SHARED_STATE = 2
"""Credentials, revocations, webhook endpoints, dead letters and silences."""
REGISTRY = 2
"""One for changes and one for lookups; in Redis, if the nodes share one."""
BUS = 1
"""The same."""
RULES_BESIDE = 2
"""One listens, one follows the log for its region."""
JOBS = 4
"""For calls, and as many for the transactions of handlers."""
WORKER = 3
"""Its session, its heartbeat, and one that listens."""


def database_connections(settings: Settings, chats: int) -> int:
    """``chats``: those of the store. Jobs and rules count unless they are elsewhere."""
    here = _server(settings.cluster.postgres)
    total = chats + LEASES + RECORD + SHARED_STATE
    if not settings.cluster.redis:
        total += REGISTRY + BUS
    if _server(settings.limits.rules_url) == here:
        total += RULES_CONNECTIONS_MAX + RULES_BESIDE
    if _server(settings.work.url) == here:
        total += 2 * JOBS + (WORKER if "work" in settings.server.roles else 0)
    return total


def _server(url: str) -> str:
    """``host:port``, or several."""
    return url.partition("://")[2].partition("/")[0].rpartition("@")[2]
