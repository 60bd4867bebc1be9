"""The listening socket, and uvicorn's server on it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import uvicorn

from holdfast import telemetry
from holdfast.clock import wait_at_most
from holdfast.errors import BadSetting
from holdfast.gateway.transport.http import App, HttpDeps, HttpRequests

BACKLOG = 2048
TICK_SECONDS = 1.0
"""How old the Date of a response may be."""
HTTP_STOP_SECONDS = 5
"""How long open requests may take after the drain."""


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket; opened first, so that a busy port changes nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            raise BadSetting(
                f"cannot listen on {host}:{port} ({error.strerror}): stop what uses it, or choose"
                " another with --port"
            ) from None
        listening.listen(BACKLOG)
        yield listening
    finally:
        listening.close()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers; ``ready`` is set when it accepts."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self._stopped = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    async def main_loop(self) -> None:
        """uvicorn's, which wakes ten times a second; this one once, for the Date."""
        while not await self.on_tick(0):
            await wait_at_most(self._stopped, TICK_SECONDS)

    def stop(self) -> None:
        self.should_exit = True
        self._stopped.set()

    def stop_accepting(self) -> None:
        """Close the listener and idle connections; open requests are answered.

        A proxy in front then finds the other nodes at once.
        """
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()


@asynccontextmanager
async def serving(
    app: App, deps: HttpDeps, listening: socket.socket, broken: asyncio.Event
) -> AsyncIterator[Callable[[], None]]:
    """Serve HTTP and upgrades; sets ``broken`` if uvicorn ends by itself.

    Gives the function that stops accepting, for the beginning of a drain.
    """
    # a factory serves where uvicorn wants a class
    protocol: Any = partial(HttpRequests, deps, telemetry.ThrottledLog())
    config = uvicorn.Config(
        app,
        interface="asgi3",
        http=protocol,
        ws="none",  # upgrades are the protocol's own
        lifespan="off",
        log_config=None,
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=HTTP_STOP_SECONDS,
    )
    server = _Server(config)
    ended = asyncio.create_task(server.serve(sockets=[listening]))
    ended.add_done_callback(lambda _: None if server.should_exit else broken.set())
    ready = asyncio.create_task(server.ready.wait())
    try:
        await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
        yield server.stop_accepting
    finally:
        ready.cancel()
        server.stop()
        await ended
