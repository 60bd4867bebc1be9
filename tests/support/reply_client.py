"""A client of the reply endpoints at the server's side of ASGI: it sends its body in
pieces, reads when it likes, and leaves when it likes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from api_rig import Rest

from holdfast.api.address_limits import AddressLimits
from holdfast.api.app import RestApp


@dataclass
class Exchange:
    """One request, and what was answered so far."""

    pieces: Sequence[bytes] = (b"",)
    piece_seconds: float = 0.0
    sent: list[Mapping[str, Any]] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    has_begun_reading: bool = False
    """The server has asked for the body."""

    def __post_init__(self) -> None:
        self._left = list(self.pieces)

    async def receive(self) -> dict[str, Any]:
        self.has_begun_reading = True
        if self._left:
            await asyncio.sleep(self.piece_seconds)
            piece = self._left.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self._left)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"]) if self.sent else 0

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def is_whole(self) -> bool:
        return bool(self.sent) and not self.sent[-1].get("more_body", False)


@dataclass
class ReplyClient:
    """Asks as alice."""

    rest: Rest

    def __post_init__(self) -> None:
        deps = self.rest.deps
        self.app = RestApp(deps, AddressLimits(deps.settings, deps.clock, deps.proxies))

    async def ask(
        self, path: str, exchange: Exchange, *headers: tuple[str, str], method: str = "POST"
    ) -> None:
        """Returns when the answer has ended."""
        who = ("authorization", f"Bearer {self.rest.token('alice')}")
        named = [("content-type", "application/json"), who, *headers]
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "client": ("192.0.2.1", 1),
            "headers": [(name.encode(), value.encode()) for name, value in named],
        }
        await self.app(scope, exchange.receive, exchange.send)

    def begin(
        self, path: str, body: Any, *headers: tuple[str, str]
    ) -> tuple[Exchange, asyncio.Task[None]]:
        """Ask, and go on while it is answered."""
        encoded = json.dumps(body).encode()
        exchange = Exchange([encoded])
        length = ("content-length", str(len(encoded)))
        return exchange, asyncio.create_task(self.ask(path, exchange, length, *headers))
