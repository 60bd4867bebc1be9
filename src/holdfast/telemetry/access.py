"""Access: who is cut off, and the keys of token issuers."""

from __future__ import annotations

from holdfast.telemetry.logs import log
from holdfast.telemetry.metrics import counter, gauge

_revocations = gauge("access_revocations", "Revocations, bans and mutes of tenants that this node holds")
_refused = counter(
    "access_revocation_refusals",
    "Tokens refused and sockets closed because of a revocation, by its kind (token, user, device, ban, tenant)",
    ("kind",),
)
_jwks_fetches = counter(
    "access_jwks_fetches",
    "Fetches of the keys of token issuers, by how they ended; ok is the only good one",
    ("outcome",),
)


def revocations_held(entries: int) -> None:
    _revocations.set(entries)


def revocation_refused(kind: str) -> None:
    """``kind`` is one of ``access.revocations.contract.RevocationKind``."""
    _refused.labels(kind).inc()


def jwks_fetched(issuer: str, keys: int, *, new: bool) -> None:
    """``new``: other keys than before, or the first good fetch after trouble."""
    _jwks_fetches.labels("ok").inc()
    if new:
        log.info("access.jwks_fetched", issuer=issuer, keys=keys)


def jwks_failed(issuer: str, reason: str, why: str, keys: int, *, new: bool) -> None:
    """``new``: another reason than the last time; the same one is counted only. ``keys``: how many go on."""
    _jwks_fetches.labels(reason).inc()
    if new:
        log.warning("access.jwks_fetch_failed", issuer=issuer, reason=reason, detail=why, keys_known=keys)


def kept_keys_unreadable(file: str, why: str) -> None:
    log.warning("access.kept_keys_unreadable", file=file, detail=why)


def kept_keys_unwritten(file: str, why: str) -> None:
    log.warning("access.kept_keys_unwritten", file=file, detail=why)
