"""What uvicorn keeps for each connection, in less memory.

A ``deque`` takes 700 bytes when it is empty, and each ``asyncio.Event`` has one. Three
of them for each connection were a tenth of what a client costs that waits for its turn.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

_writable = asyncio.Event()
_writable.set()


class LeanFlow(FlowControl):
    """uvicorn's flow control; it makes an Event when the client stops reading."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.read_paused = self.write_paused = False
        self._is_writable_event = _writable

    def pause_writing(self) -> None:
        if not self.write_paused:
            self.write_paused = True
            self._is_writable_event = asyncio.Event()

    def resume_writing(self) -> None:
        if self.write_paused:
            self.write_paused = False
            self._is_writable_event.set()
            self._is_writable_event = _writable


class LeanPipeline(list[Any]):
    """Requests that wait behind the one being answered: few, and bounded."""

    def appendleft(self, request: Any) -> None:
        self.insert(0, request)

    def popleft(self) -> Any:
        return self.pop(0)


class NoWaiter:
    """In place of the Event of a request whose body was read: nobody waits for it."""

    def set(self) -> None:
        pass


NO_WAITER = NoWaiter()
