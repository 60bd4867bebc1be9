"""Access: who is cut off."""

from __future__ import annotations

from holdfast.telemetry.metrics import counter, gauge

_revocations = gauge("access_revocations", "Revocations, bans and mutes of tenants that this node holds")
_refused = counter(
    "access_revocation_refusals",
    "Tokens refused and sockets closed because of a revocation, by its kind (token, user, device, ban)",
    ("kind",),
)


def revocations_held(entries: int) -> None:
    _revocations.set(entries)


def revocation_refused(kind: str) -> None:
    """``kind`` is one of ``access.revocations.contract.RevocationKind``."""
    _refused.labels(kind).inc()
