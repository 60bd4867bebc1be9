"""What a token says of itself, and where tokens come from."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable

import msgspec

TokenProvider = Callable[[], Awaitable[str]]


class Claims(msgspec.Struct, frozen=True):
    """What we read of a JWT. Nothing is verified: that is the server's part."""

    sub: str = ""
    tenant: str = ""
    exp: float | None = None


_claims = msgspec.json.Decoder(Claims)


def claims_of(token: str) -> Claims:
    """The claims of a JWT; empty ones if it is no JWT."""
    parts = token.split(".")
    try:
        return _claims.decode(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (IndexError, ValueError, msgspec.DecodeError):
        return Claims()
