"""HTTP calls to endpoints, with aiohttp.

Imported with the first call: the import takes a fifth of a server's startup time, and
most servers have no webhooks.

The dispatch of jobs bounds how many calls run at once, so a call never waits for
another one's connection. Connecting and responding have a timeout each; the second one
starts when the connection is ready.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import aiohttp
from aiohttp import AddrInfoType
from aiohttp.abc import AbstractResolver, ResolveResult

from holdfast.drivers.outbound_http import BoundedConnector, open_session
from holdfast.webhooks.address_guard import RefusedAddress, is_public

RESOLVING_MAX = 32
"""Names resolved at once, each in a thread; a slow name server blocks only its own."""
_NAMES_KNOWN_SECONDS = 10
_IDLE_SECONDS = 3.0
"""How long an idle connection is reused. Servers close idle connections after 5 s or
more, and a POST on a closed one fails."""
_TEXT_SECONDS = 1.0
"""How long to read a response's text, which is only for the log."""


def public_socket(info: AddrInfoType) -> socket.socket:
    """A socket to connect to this address; RefusedAddress if it is not public."""
    family, kind, protocol, _, address = info
    if not is_public(address[0]):
        raise RefusedAddress
    return socket.socket(family, kind, protocol)


class _Resolver(AbstractResolver):
    """getaddrinfo in its own threads: no other thread pool waits for name servers."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(RESOLVING_MAX, thread_name_prefix="webhook-resolver")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        look_up = partial(
            socket.getaddrinfo,
            host,
            port,
            family=family,
            type=socket.SOCK_STREAM,
            flags=socket.AI_ADDRCONFIG,
        )
        found = await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
        numeric = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=int(address[1]),
                family=kind,
                proto=protocol,
                flags=numeric,
            )
            for kind, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True)
class _Call:
    """The deadline of a call: first to connect, then, once ``sent``, to respond."""

    deadline: asyncio.Timeout
    answer_seconds: float
    sent: bool = False

    def begin(self) -> None:
        self.sent = True
        self.deadline.reschedule(asyncio.get_running_loop().time() + self.answer_seconds)


async def _connected(
    _session: aiohttp.ClientSession, context: SimpleNamespace, _details: object
) -> None:
    context.trace_request_ctx.begin()


class WebhookCaller:
    """Posts to endpoints. Create it inside the event loop."""

    def __init__(
        self, *, timeout_seconds: float, connect_timeout_seconds: float, private_allowed: bool
    ) -> None:
        self._timeout_seconds, self._connect_timeout_seconds = (
            timeout_seconds,
            connect_timeout_seconds,
        )
        connector = BoundedConnector(
            resolver=_Resolver(),
            socket_factory=None if private_allowed else public_socket,
            limit=0,
            ttl_dns_cache=_NAMES_KNOWN_SECONDS,
            keepalive_timeout=_IDLE_SECONDS,
        )
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_create_end.append(_connected)
        tracing.on_connection_reuseconn.append(_connected)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=None)
        self._session = open_session(connector, timeout=timeout, trace_configs=[tracing])

    async def post(
        self, url: str, body: bytes, headers: Mapping[str, str], bytes_max: int
    ) -> tuple[int, bytes, str]:
        """(status, at most ``bytes_max`` of the text, Retry-After), or OSError."""
        deadline = asyncio.timeout(self._connect_timeout_seconds)
        call = _Call(deadline, self._timeout_seconds)
        try:
            async with (
                deadline,
                self._session.post(
                    url, data=body, headers=headers, allow_redirects=False, trace_request_ctx=call
                ) as answer,
            ):
                deadline.reschedule(None)
                return (
                    answer.status,
                    await _text(answer, bytes_max),
                    answer.headers.get("retry-after", ""),
                )
        except TimeoutError as error:
            if call.sent:
                raise OSError(f"no answer within {self._timeout_seconds:g} s") from error
            raise OSError(f"no connection within {self._connect_timeout_seconds:g} s") from error
        except aiohttp.ClientResponseError as error:
            # the parser's; its status 400 is not the endpoint's
            raise OSError(f"the answer is not valid HTTP: {error.message}") from error
        except aiohttp.ClientError as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        await self._session.close()


async def _text(answer: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    """The text that arrives within the time, up to ``bytes_max``."""
    text = bytearray()
    try:
        async with asyncio.timeout(_TEXT_SECONDS):
            while len(text) < bytes_max and (
                piece := await answer.content.read(bytes_max - len(text))
            ):
                text += piece
    except (TimeoutError, aiohttp.ClientError):
        pass  # the status alone decides
    return bytes(text)
