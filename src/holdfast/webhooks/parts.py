"""The settings of work and webhooks, and the parts that a node holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.drivers.cluster import check_postgres_url
from holdfast.webhooks.contract import WebhookEndpoints
from holdfast.webhooks.delivery import WebhookSettings
from holdfast.webhooks.parking import ParkedStatus
from holdfast.work.contract import WorkStore


@dataclass(frozen=True, slots=True)
class WorkSettings:
    """Where a node's jobs are and how they run."""

    url: str = ""
    """``sqlite:`` (work.db in the state directory) or a PostgreSQL database's URL. Left
    empty: ``cluster.postgres`` if that is set, else ``sqlite:``.
    """
    concurrency: int = 100
    """Jobs that run at once, at most 4,096; the others wait in the store."""
    stuck_loop_seconds: float = 30.0
    """A server whose event loop has not run for this time writes its stacks to stderr,
    gives up its jobs and ends with exit code 70, so that its supervisor restarts it. 0:
    never."""
    webhooks: WebhookSettings = field(default_factory=WebhookSettings)

    def __post_init__(self) -> None:
        if self.url not in ("", "sqlite:"):
            if "://" not in self.url:
                raise ValueError("url must be sqlite: or begin with postgresql://")
            check_postgres_url("url", self.url)
        if not 1 <= self.concurrency <= 4096:
            raise ValueError("concurrency must be between 1 and 4096")
        if self.stuck_loop_seconds != 0 and not 1 <= self.stuck_loop_seconds <= 3600:
            raise ValueError("stuck_loop_seconds must be 0 (never) or between 1 and 3600")


@dataclass(frozen=True, slots=True)
class WebhookParts:
    """The webhooks of a node.

    ``private_allowed``: endpoints may be on private addresses; for development only.
    ``begun``: whether an endpoint that is added now gets everything committed from now
    on. ``parked``: the jobs that wait for disabled endpoints.
    """

    endpoints: WebhookEndpoints
    private_allowed: bool = False
    begun: Callable[[], bool] = lambda: True
    parked: Callable[[], ParkedStatus] = ParkedStatus


@dataclass(frozen=True, slots=True)
class WorkParts:
    """A node's jobs, and its webhooks. ``up``: whether the job store responds."""

    jobs: WorkStore
    webhooks: WebhookParts
    up: Callable[[], bool]

    def dependencies(self) -> dict[str, str]:
        """For display only: a node is ready without jobs; webhooks catch up later."""
        return {"jobs": "up" if self.up() else "down"}
