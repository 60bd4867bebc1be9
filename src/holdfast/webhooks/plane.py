"""The parts of work and webhooks as a node holds them, and how they are set."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.webhooks.contract import Endpoints
from holdfast.webhooks.delivery import WebhookSettings
from holdfast.work.contract import WorkStore


@dataclass(frozen=True, slots=True)
class WorkSettings:
    """Where a node's jobs are: ``sqlite:`` (work.db in the state directory) or the URL of a PostgreSQL database."""

    url: str = "sqlite:"
    concurrency: int = 100
    webhooks: WebhookSettings = field(default_factory=WebhookSettings)

    def __post_init__(self) -> None:
        if self.url != "sqlite:" and not self.url.startswith(("postgres://", "postgresql://")):
            raise ValueError("url must be sqlite: or begin with postgresql://")
        if not 1 <= self.concurrency <= 4096:
            raise ValueError("concurrency must be between 1 and 4096")


@dataclass(frozen=True, slots=True)
class WebhookPlane:
    """``private_allowed``: endpoints may be on private addresses; for development only."""

    endpoints: Endpoints
    private_allowed: bool = False


@dataclass(frozen=True, slots=True)
class WorkPlane:
    """The jobs of a node, and the webhooks that run on them."""

    jobs: WorkStore
    webhooks: WebhookPlane
