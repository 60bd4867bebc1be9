"""What every bus does the same way: gathering notifications and reading payloads.

A payload is JSON: who sent it, and a list of notifications. It costs the same for one
notification or fifty, so a node sends at most one per ``GATHER_SECONDS``, or several if
one would be too large.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Final

import msgspec

from holdfast import telemetry
from holdfast.errors import HoldfastError
from holdfast.fanout.bus.contract import Notification

GATHER_SECONDS = 0.02
SEND_SECONDS = 1.0
"""How long a payload may take to leave; then it is dropped."""
WAITING_MAX = 10_000
"""Notifications that wait to be sent. Further ones are dropped and counted."""


class _Payload(msgspec.Struct):
    sender: str
    notifications: list[msgspec.Raw]


_encode = msgspec.json.Encoder().encode
_decode_payload = msgspec.json.Decoder(_Payload).decode
_decode: Final = msgspec.json.Decoder[Notification](Notification).decode


class BusOutbox:
    """The notifications of one node that wait to be sent."""

    def __init__(self, sender: str, payload_bytes_max: int) -> None:
        self._sender = sender
        self._room = payload_bytes_max - len(_encode(_Payload(sender, [])))
        self._waiting: dict[Notification, None] = {}
        self._news = asyncio.Event()

    def add(self, notification: Notification) -> None:
        if len(self._waiting) >= WAITING_MAX:
            telemetry.bus_notifications("dropped")
            return
        self._waiting[notification] = None
        self._news.set()

    async def run(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        """Send payloads until cancelled. One that cannot be sent is dropped: it is
        worth less with every moment.
        """
        while True:
            await self._news.wait()
            await asyncio.sleep(GATHER_SECONDS)
            self._news.clear()
            waiting, self._waiting = self._waiting, {}
            for payload, count in self._payloads(waiting):
                try:
                    async with asyncio.timeout(SEND_SECONDS):
                        await send(payload)
                except (HoldfastError, TimeoutError):
                    telemetry.bus_notifications("dropped", count)
                else:
                    telemetry.bus_notifications("sent", count)

    def _payloads(self, notifications: Iterable[Notification]) -> Iterator[tuple[bytes, int]]:
        """As few payloads as hold them all; what is too large alone is dropped."""
        parts: list[msgspec.Raw] = []
        size = 0
        for notification in notifications:
            part = _encode(notification)
            if len(part) + 1 > self._room:
                telemetry.bus_notifications("dropped")
                continue
            if size + len(part) + 1 > self._room:
                yield _encode(_Payload(self._sender, parts)), len(parts)
                parts, size = [], 0
            parts.append(msgspec.Raw(part))
            size += len(part) + 1
        if parts:
            yield _encode(_Payload(self._sender, parts)), len(parts)


class BusInbox:
    """Reads payloads and calls the subscribers of one node."""

    def __init__(self, sender: str) -> None:
        self._sender = sender
        self._subscribers: list[Callable[[Notification], None]] = []

    def subscribe(self, on_notification: Callable[[Notification], None]) -> None:
        self._subscribers.append(on_notification)

    def on_payload(self, data: bytes | str) -> None:
        """Pass on what others sent. What cannot be read is counted and skipped."""
        try:
            payload = _decode_payload(data)
        except msgspec.MsgspecError:
            telemetry.bus_notifications("unreadable")
            return
        if payload.sender == self._sender:
            return
        for part in payload.notifications:
            try:
                notification = _decode(part)
            except msgspec.MsgspecError:
                telemetry.bus_notifications("unreadable")
                continue
            telemetry.bus_notifications("received")
            self._pass_on(notification)

    def _pass_on(self, notification: Notification) -> None:
        for subscriber in self._subscribers:
            try:
                subscriber(notification)
            except Exception as error:
                telemetry.defect("bus", error)
