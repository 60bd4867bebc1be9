"""Webhook endpoints and the log of deliveries to them. Adapters: sqlite, postgres."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

JOB_TYPE = "webhook"
DELIVERIES_KEPT_PER_ENDPOINT = 1000


class WebhookEndpoint(Struct, frozen=True):
    """A URL that gets a tenant's messages. ``disabled``: why it gets none."""

    endpoint_id: str
    tenant: str
    url: str
    secret: str
    description: str
    created_at: str
    disabled: str = ""
    disabled_at: str = ""


class Delivery(Struct, frozen=True):
    """One attempt. ``status`` 0: no response; empty ``chat_id``: a test."""

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
    """The endpoints. Changes are on stable storage when the call returns."""

    async def add(self, endpoint: WebhookEndpoint) -> None: ...

    async def get(self, endpoint_id: str) -> WebhookEndpoint:
        """NotFound if there is none."""
        ...

    async def all(self) -> Sequence[WebhookEndpoint]:
        """All endpoints, oldest first."""
        ...

    async def disable(self, endpoint_id: str, why: str, at: str) -> None:
        """Disable; a first disabling keeps its time. NotFound if there is none."""
        ...

    async def enable(self, endpoint_id: str) -> None:
        """NotFound if there is none."""
        ...

    async def remove(self, endpoint_id: str) -> None:
        """Remove the endpoint and its log. NotFound if there is none."""
        ...

    async def removed(self, endpoint_id: str) -> bool:
        """Whether such an endpoint existed and was removed."""
        ...

    async def log(self, delivery: Delivery) -> None:
        """Log a delivery; ``DELIVERIES_KEPT_PER_ENDPOINT`` of each are kept."""
        ...

    async def deliveries(self, endpoint_id: str, limit: int = 100) -> Sequence[Delivery]:
        """Newest first."""
        ...

    async def last_seconds(self) -> dict[str, float]:
        """The duration of the last delivery, by endpoint id; only those with one."""
        ...

    @property
    def version(self) -> int:
        """A number that differs after every change that was made through this object,
        and soon after one that another node made."""
        ...

    async def stored_version(self) -> int:
        """The version now, with the changes of all nodes."""
        ...

    async def changed(self, version: int) -> None:
        """Wait until the version differs from this one. Cancel-safe."""
        ...
