"""Standard Webhooks: three headers, HMAC-SHA256 over id, time and body. (Pure.)

A receiver computes the same over the raw body, compares in constant time, and refuses
old timestamps.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping

from holdfast.errors import InvalidMessage, Unauthorized

PREFIX = "whsec_"
SECRET_BYTES = 32
TOLERANCE_SECONDS = 300.0


def new_secret(randomness: bytes) -> str:
    """A secret in the format that receivers' libraries expect."""
    if len(randomness) < 24:
        raise ValueError("a secret needs at least 24 random bytes")
    return PREFIX + base64.b64encode(randomness).decode()


def sign(secret: str, webhook_id: str, now: float, body: bytes) -> dict[str, str]:
    """Sign ``body``; return the headers to send with it."""
    at = str(int(now))
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": at,
        "webhook-signature": f"v1,{_signature(secret, webhook_id, at, body)}",
        "content-type": "application/json",
    }


def verify(secret: str, sent: Mapping[str, str], now: float, body: bytes) -> None:
    """For receivers: Unauthorized unless the signature is right and the time recent."""
    try:
        webhook_id, at, signatures = (
            sent[f"webhook-{name}"] for name in ("id", "timestamp", "signature")
        )
        fresh = abs(now - int(at)) <= TOLERANCE_SECONDS
    except (KeyError, ValueError):
        raise Unauthorized("a webhook header is missing or malformed") from None
    if not fresh:
        raise Unauthorized("the webhook is too old or from the future")
    expected = _signature(secret, webhook_id, at, body)
    candidates = [
        given.removeprefix("v1,") for given in signatures.split() if given.startswith("v1,")
    ]
    if not any(hmac.compare_digest(expected, given) for given in candidates):
        raise Unauthorized("the webhook's signature is wrong")


def _signature(secret: str, webhook_id: str, at: str, body: bytes) -> str:
    try:
        key = base64.b64decode(secret.removeprefix(PREFIX), validate=True)
    except binascii.Error:
        raise InvalidMessage("a webhook secret is base64 after whsec_", field="secret") from None
    signed = b".".join((webhook_id.encode(), at.encode(), body))
    return base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
