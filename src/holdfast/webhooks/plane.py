"""The parts of webhooks as the API holds them, put together by the node."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.webhooks.contract import Endpoints


@dataclass(frozen=True, slots=True)
class WebhookPlane:
    """``private_allowed``: endpoints may be on private addresses; for development only."""

    endpoints: Endpoints
    private_allowed: bool = False
