"""Calls to endpoints, on aiohttp. Imported when the first one is made: it takes a fifth of a server's start, and most
servers call nobody.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

import aiohttp
from aiohttp import ThreadedResolver
from aiohttp.abc import AbstractResolver, ResolveResult

from holdfast.webhooks.guard import RefusedAddress, is_public


class GuardedResolver(AbstractResolver):
    """Resolves names to public addresses only. A literal address never comes here; ``check_url`` has seen it."""

    def __init__(self, *, private_allowed: bool = False) -> None:
        self._private_allowed = private_allowed
        self._resolver = ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        allowed = [result for result in found if self._private_allowed or is_public(result["host"])]
        if not allowed:
            raise RefusedAddress(f"{host} has no public address")
        return allowed

    async def close(self) -> None:
        await self._resolver.close()


class Caller:
    """Posts to endpoints, a few connections to each; made inside the event loop."""

    def __init__(self, *, timeout_seconds: float, connections_per_host: int, private_allowed: bool) -> None:
        connector = aiohttp.TCPConnector(
            resolver=GuardedResolver(private_allowed=private_allowed),
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
