"""Fetches an issuer's keys from an address, within bounds, or from a file.

The operator sets the address, so it may also be on a private network. Its answer is
untrusted: no redirect is followed, no proxy, cookie or credential is used, nothing is
decompressed, and no more is read than a key set may have. aiohttp is imported with the
first fetch, because the import takes a fifth of a server's start.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.access.jwks import JWKS_BYTES_MAX, BadJwks

if TYPE_CHECKING:
    import aiohttp


async def fetch_jwks(jwks: str) -> bytes:
    """The bytes of a key set, at most one more than allowed; BadJwks if there are none.

    Cancel-safe.
    """
    if "://" in jwks:
        return await _from_address(jwks)
    return await asyncio.to_thread(_from_file, Path(jwks))


def _from_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(JWKS_BYTES_MAX + 1)
    except OSError as error:
        raise BadJwks("unreachable", f"{path} cannot be read: {error.strerror}") from None


async def _from_address(url: str) -> bytes:
    import aiohttp

    from holdfast.drivers.outbound_http import ExcessiveAnswer, open_session

    try:
        async with (
            open_session(headers={"Accept": "application/json"}) as session,
            session.get(url, allow_redirects=False) as answer,
        ):
            if 300 <= answer.status < 400:
                raise BadJwks(
                    "redirect",
                    f"it is answered with a redirect ({answer.status}), which is not followed",
                )
            if answer.status != 200:
                raise BadJwks("status", f"it is answered with {answer.status}")
            if answer.headers.get("Content-Encoding", "identity") != "identity":
                raise BadJwks("invalid", "it is compressed, though that was not asked for")
            return await _body(answer)
    except ExcessiveAnswer as error:
        raise BadJwks("too_large", f"it is not answered within bounds: {error}") from None
    except aiohttp.ClientResponseError as error:
        raise BadJwks("invalid", f"its answer is not valid HTTP: {error.message[:200]}") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise BadJwks(
            "unreachable", f"it cannot be reached: {str(error)[:200] or type(error).__name__}"
        ) from None


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    while len(data) <= JWKS_BYTES_MAX and (
        piece := await answer.content.read(JWKS_BYTES_MAX + 1 - len(data))
    ):
        data += piece
    return bytes(data)
