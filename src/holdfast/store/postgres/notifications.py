"""Notifications that something was committed, from this node and to it.

NOTIFY comes after the commit and on a connection of its own: inside a transaction it
takes a lock that all commits of the server wait for. Many commits share one: it costs
this node, the server and every other node the same whether one message is new or a
hundred, so the more sends one has announced, the longer the next waits. A notification
carries nothing and may be lost: the log looks by itself every 100 ms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from holdfast import telemetry
from holdfast.drivers.postgres import driver_text
from holdfast.errors import HoldfastError
from holdfast.store.postgres.errors import FOREIGN
from holdfast.store.postgres.server import CHANNEL, ChatsServer, ServerConnection

RECONNECT_SECONDS = 1.0
CLOSE_SECONDS_MAX = 0.5
REST_SECONDS_PER_SEND, REST_SECONDS_MAX = 0.0001, 0.01
"""Between two notifications. Groups of 60 sends from each of two nodes would make 400 a
second; a lone send makes the next wait 0.1 ms."""


class CommitNotifications:
    """Publishes this node's commits, and calls listeners for everybody's."""

    def __init__(self, server: ChatsServer) -> None:
        self._server = server
        self._listeners: list[Callable[[], None]] = []
        self._has_news = asyncio.Event()
        self._sends = 0
        """Committed since the last notification."""
        self._publisher: asyncio.Task[None] | None = None
        self._subscriber: asyncio.Task[None] | None = None
        self._is_closing = False
        self._publishing_process = 0
        """Of the server, for our own connection: what it sends we know already."""

    def on_grown(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` when the log may have grown."""
        self._listeners.append(listener)
        if self._subscriber is None:
            self._subscriber = asyncio.create_task(self._keep(self._subscribe))

    def announce(self, sends: int = 1) -> None:
        """This node has committed this many sends, or something else."""
        self._sends += sends
        self._has_news.set()
        if self._publisher is None:
            self._publisher = asyncio.create_task(self._keep(self._publish))
        self._call_listeners()

    async def close(self) -> None:
        """Announce what is left, then end."""
        self._is_closing = True
        self._has_news.set()
        if self._publisher is not None:
            await asyncio.wait((self._publisher,), timeout=CLOSE_SECONDS_MAX)
        tasks = [task for task in (self._publisher, self._subscriber) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _call_listeners(self) -> None:
        for listener in self._listeners:
            listener()

    async def _keep(self, use: Callable[[ServerConnection], Coroutine[Any, Any, None]]) -> None:
        """Use a connection of its own, and open it again whenever it is lost."""
        while not self._is_closing:
            connection = None
            try:
                connection = await self._server.connect()
                await use(connection)
            except (HoldfastError, *FOREIGN) as error:
                telemetry.log.warning("store.notifications_interrupted", error=driver_text(error))
            finally:
                if connection is not None:
                    connection.terminate()
            if not self._is_closing:
                await asyncio.sleep(RECONNECT_SECONDS)

    async def _publish(self, connection: ServerConnection) -> None:
        self._publishing_process = connection.raw.get_server_pid()
        # Nothing is stored here: a crash loses notifications only.
        await connection.raw.execute("SET synchronous_commit = off")
        while not self._is_closing:
            await self._has_news.wait()
            self._has_news.clear()
            sends, self._sends = self._sends, 0
            await connection.fetchrow("notify")
            await asyncio.sleep(min(sends * REST_SECONDS_PER_SEND, REST_SECONDS_MAX))

    async def _subscribe(self, connection: ServerConnection) -> None:
        lost = asyncio.Event()
        connection.raw.add_termination_listener(lambda _: lost.set())
        await connection.raw.add_listener(CHANNEL, self._on_notification)
        self._call_listeners()  # for what came before
        await lost.wait()

    def _on_notification(self, _connection: Any, process: int, *_: Any) -> None:
        if process != self._publishing_process:
            self._call_listeners()
