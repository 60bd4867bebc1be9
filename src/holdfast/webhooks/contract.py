"""Endpoints and the log of what was delivered to them. Adapters: sqlite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

JOB_TYPE = "webhook"
DELIVERIES_KEPT_PER_ENDPOINT = 1000


class WebhookEndpoint(Struct, frozen=True):
    """Where the messages of a tenant are sent. ``disabled``: why it gets nothing; empty while it does."""

    endpoint_id: str
    tenant: str
    url: str
    secret: str
    description: str
    created_at: str
    disabled: str = ""
    disabled_at: str = ""


class Delivery(Struct, frozen=True):
    """One try. ``status`` 0: no answer; ``chat_id`` empty: a test."""

    endpoint_id: str
    webhook_id: str
    chat_id: str
    sequence: int
    attempt: int
    at: str
    status: int
    seconds: float
    error: str = ""


class WebhookEndpoints(Protocol):
    """What is said to be done is on stable storage when the call returns."""

    async def add(self, endpoint: WebhookEndpoint) -> None: ...

    async def get(self, endpoint_id: str) -> WebhookEndpoint:
        """NotFound if there is none."""
        ...

    async def all(self) -> Sequence[WebhookEndpoint]:
        """By creation."""
        ...

    async def disable(self, endpoint_id: str, why: str, at: str) -> None:
        """One that is disabled keeps its first time. NotFound if there is none."""
        ...

    async def enable(self, endpoint_id: str) -> None:
        """NotFound if there is none."""
        ...

    async def remove(self, endpoint_id: str) -> None:
        """With its log. NotFound if there is none."""
        ...

    async def removed(self, endpoint_id: str) -> bool:
        """Whether there was such an endpoint here; False for one that never was."""
        ...

    async def log(self, delivery: Delivery) -> None:
        """Of each endpoint the last ``DELIVERIES_KEPT_PER_ENDPOINT`` are kept."""
        ...

    async def deliveries(self, endpoint_id: str, limit: int = 100) -> Sequence[Delivery]:
        """Newest first."""
        ...

    async def last_seconds(self) -> dict[str, float]:
        """How long the last delivery to each endpoint took, by its id; those without one are left out."""
        ...

    @property
    def version(self) -> int:
        """Rises with every change of endpoints made through this object."""
        ...

    async def changed(self, version: int) -> None:
        """Wait until ``version`` is another one. Cancel-safe."""
        ...
