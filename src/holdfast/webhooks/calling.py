"""Calls to endpoints, on aiohttp. Imported when the first one is made: it takes a fifth of a server's start, and most
servers call nobody.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

import aiohttp
from aiohttp import AddrInfoType, ThreadedResolver

from holdfast.webhooks.guard import RefusedAddress, is_public


def public_socket(address: AddrInfoType) -> socket.socket:
    """The socket that will connect to this address; RefusedAddress if it is not public."""
    family, kind, protocol, _, place = address
    if not is_public(place[0]):
        raise RefusedAddress
    return socket.socket(family, kind, protocol)


class Caller:
    """Posts to endpoints, a few connections to each; made inside the event loop."""

    def __init__(self, *, timeout_seconds: float, connections_per_host: int, private_allowed: bool) -> None:
        connector = aiohttp.TCPConnector(
            resolver=ThreadedResolver(),
            socket_factory=None if private_allowed else public_socket,
            limit_per_host=connections_per_host,
            use_dns_cache=False,
        )
        timeout = aiohttp.ClientTimeout(total=timeout_seconds)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
        )

    async def post(self, url: str, body: bytes, headers: Mapping[str, str], bytes_max: int) -> tuple[int, bytes, str]:
        """(status, as much of the answer as ``bytes_max``, its Retry-After). OSError if there is no answer."""
        try:
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as answer:
                text = await answer.content.read(bytes_max)
                return answer.status, text, answer.headers.get("retry-after", "")
        except (TimeoutError, aiohttp.ClientError) as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        await self._session.close()
