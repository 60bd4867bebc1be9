"""Where the client's token comes from, and when it ends."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Awaitable, Callable

import msgspec

TokenProvider = Callable[[], Awaitable[str]]


class _Claims(msgspec.Struct):
    exp: float | None = None


_claims = msgspec.json.Decoder(_Claims)


def expiry_of(token: str) -> float | None:
    """When a JWT says that it ends (seconds since the epoch); None if it does not say. Nothing is verified."""
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        return _claims.decode(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))).exp
    except (binascii.Error, ValueError, msgspec.DecodeError):
        return None
