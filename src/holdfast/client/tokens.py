"""What a token says of itself, and where tokens come from."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from holdfast.errors import OperatorError, Refused

TokenProvider = Callable[[], Awaitable[str]]


class NoToken(Exception):
    """None can be had now; the text says why."""


async def fresh(provider: TokenProvider, timeout_seconds: float) -> str:
    """A new token of the application's provider.

    A ``Refused`` or ``OperatorError`` of the provider is raised as it is: it says that there is no use. Whatever
    else it raises, and silence, is NoToken: where tokens come from may be down for a moment, and we cannot know the
    errors of every library that may tell so.
    """
    try:
        async with asyncio.timeout(timeout_seconds) as patience:
            return await provider()
    except (Refused, OperatorError):
        raise
    except Exception as error:
        why = f"none within {timeout_seconds:g} s" if patience.expired() else str(error) or type(error).__name__
        raise NoToken(f"no token: {why}") from error


class Claims(msgspec.Struct, frozen=True):
    """What we read of a JWT. Nothing is verified: that is the server's part."""

    sub: str = ""
    tenant: str = ""
    exp: float | None = None
    jti: Any = None


_claims = msgspec.json.Decoder(Claims)


def claims_of(token: str) -> Claims:
    """The claims of a JWT; empty ones if it is no JWT."""
    parts = token.split(".")
    try:
        return _claims.decode(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (IndexError, ValueError, msgspec.DecodeError):
        return Claims()
