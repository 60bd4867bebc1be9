"""Closes the connections of revoked credentials within a second.

Nothing more is read from such a connection. Its open requests may still be answered for
``ANSWER_SECONDS``; the close then answers sends without a result as unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from holdfast import telemetry
from holdfast.access.revocations.contract import Revocation
from holdfast.clock import Turns
from holdfast.gateway.connection import Connection
from holdfast.gateway.contract import GatewayDeps
from holdfast.message import User
from holdfast.session.roster import Roster
from holdfast.wire.close_codes import CloseReason

ANSWER_SECONDS = 0.5
"""How long a connection stays open for the answers to its open requests."""


class _Leaving(NamedTuple):
    until: float
    closing: CloseReason
    message: str


class Cutoff:
    """Closes connections of one gateway after a revocation, or for an operator."""

    def __init__(
        self,
        deps: GatewayDeps,
        roster: Roster[Connection],
        connections: Callable[[], Iterable[Connection]],
    ) -> None:
        self._deps = deps
        self._roster = roster
        self._connections = connections
        self._leaving: dict[Connection, _Leaving] = {}
        self._checking: asyncio.Task[None] | None = None
        self._check_again = False

    def on_revoked(self, entries: Sequence[Revocation]) -> None:
        """Close the connections that these revocations concern.

        One that names no user (but a token's id or a tenant) may concern any
        connection.
        """
        for user in {User(entry.tenant, entry.user_id) for entry in entries if entry.user_id}:
            for connection in self._roster.of_user(user):
                self._judge(connection)
        if any(not entry.user_id for entry in entries):
            self._check_again = True
            if self._checking is None:
                self._checking = asyncio.create_task(self._check_all())
                self._checking.add_done_callback(self._on_checked)

    def disconnect(self, user: User, device_id: str | None = None) -> int:
        """Close a user's connections, or one device's; they may reconnect. How many."""
        found = [
            c for c in self._roster.of_user(user) if device_id is None or c.device_id == device_id
        ]
        for connection in found:
            self._close(
                connection,
                CloseReason.ROTATION,
                "an operator closed this connection; open a new one",
            )
        return len(found)

    def tick(self, now: float) -> None:
        """Close those whose requests are answered, or whose time is over."""
        for connection, leaving in list(self._leaving.items()):
            if now >= leaving.until or not connection.open_requests:
                del self._leaving[connection]
                _end(connection, leaving.closing, leaving.message)

    def forget(self, connection: Connection) -> None:
        """The connection has ended by itself."""
        self._leaving.pop(connection, None)

    async def stop(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.gather(self._checking, return_exceptions=True)

    def _judge(self, connection: Connection) -> None:
        if not connection.authenticated:
            return
        if (
            refusal := self._deps.refusal(connection.session.principal, connection.device_id)
        ) is not None:
            self._close(connection, CloseReason.UNAUTHORIZED, refusal.message)

    def _close(self, connection: Connection, closing: CloseReason, message: str) -> None:
        if connection.closing is not None:  # it lingers already
            return
        connection.stop_reading()
        if connection.open_requests:
            until = self._deps.clock.monotonic() + ANSWER_SECONDS
            self._leaving.setdefault(connection, _Leaving(until, closing, message))
        else:
            _end(connection, closing, message)

    async def _check_all(self) -> None:
        """Judge every connection, yielding to the loop between turns."""
        turns = Turns(self._deps.clock)
        while self._check_again:
            self._check_again = False
            for connection in list(self._connections()):
                self._judge(connection)
                await turns.give_way()

    def _on_checked(self, task: asyncio.Task[None]) -> None:
        self._checking = None
        if not task.cancelled() and (error := task.exception()) is not None:
            telemetry.defect("gateway", error)


def _end(connection: Connection, closing: CloseReason, message: str) -> None:
    """Close it; a defect here must not keep the other connections open."""
    try:
        connection.close(closing, message=message)
    except Exception as error:
        telemetry.defect("gateway", error)
        connection.abort()
