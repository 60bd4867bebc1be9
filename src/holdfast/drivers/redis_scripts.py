"""The pipe to Redis, one connection: script calls go out when they are made, answers come back in that order.

redis-py opens it, with TLS, AUTH and SELECT. From then on its transport is ours: the streams, timeouts and coroutines
around each of its answers cost more than the answer, and a node gets a thousand of them a second.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable
from importlib.resources import files
from typing import Any, Final

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import InvalidResponse

from holdfast.errors import HoldfastError, OutcomeUnknown, Unavailable

_NOT_YET: Final = object()


class Script:
    """A Lua source and the name under which Redis remembers it."""

    def __init__(self, *names: str) -> None:
        folder = files("holdfast.limits.counters") / "lua"
        self.source = "\n".join((folder / f"{name}.lua").read_text() for name in names)
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


class ScriptCall:
    """A script call; its ``answer`` is what ``read`` makes of what Redis says."""

    __slots__ = ("answer", "arguments", "read", "script", "sent_at")

    def __init__(self, script: Script, keys: list[bytes], arguments: tuple[Any, ...], read: Callable[[Any], Any]):
        self.script = script
        self.arguments = (len(keys), *keys, *arguments)
        self.read = read
        self.sent_at = 0.0
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Pipe(asyncio.Protocol):
    """See the module. Who sends bounds what is under way. ``usable``: it may be sent to.
    ``on_trouble`` is called with why calls fail.

    Nothing is ever sent twice: a connection that breaks after the send leaves the outcome unknown. The one exception
    is NOSCRIPT, by which Redis says that it ran nothing. An answer that nobody waits for any more is passed over.
    """

    def __init__(
        self,
        connection: AbstractConnection,
        silence_max_seconds: float,
        on_trouble: Callable[[Exception | str], None] = lambda _: None,
    ) -> None:
        """``connection`` is open, and left to this. Redis silent for so long is given up."""
        reader, writer = connection._reader, connection._writer
        assert writer is not None
        connection._reader = connection._writer = None
        self._streams = reader, writer  # a stream that is forgotten closes its transport
        self._transport = writer.transport
        self._transport.set_protocol(self)
        self._loop = asyncio.get_running_loop()
        self._silence_max = silence_max_seconds
        self._on_trouble = on_trouble
        self._parser = hiredis.Reader(notEnoughData=_NOT_YET)
        self._calls: deque[ScriptCall] = deque()
        self._watch: asyncio.TimerHandle | None = None
        self._gave_up: Exception | None = None
        self.usable = True

    def send(self, call: ScriptCall) -> asyncio.Future[Any]:
        self._write(call, ("EVALSHA", call.script.sha, *call.arguments))
        return call.answer

    def retire(self) -> None:
        """Close it as soon as what was sent is answered."""
        self.usable = False
        if not self._calls:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed(data)
            while (answer := self._parser.gets()) is not _NOT_YET:
                self._answered(self._calls.popleft(), answer)
        except (hiredis.ProtocolError, IndexError):  # no Redis, or one that answers unasked
            self._gave_up = InvalidResponse("what answers is no Redis")
            self._transport.abort()
        if not self.usable:
            self.retire()

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        if self._watch is not None:
            self._watch.cancel()
        if self._calls:
            self._on_trouble(self._gave_up or error or ConnectionError("Redis closed the connection"))
        while self._calls:
            self._calls.popleft().fail(OutcomeUnknown("the counters did not answer"))

    def _write(self, call: ScriptCall, command: tuple[Any, ...]) -> None:
        call.sent_at = self._loop.time()
        if self._watch is None:
            self._watch = self._loop.call_later(self._silence_max, self._look)
        self._calls.append(call)
        self._transport.write(hiredis.pack_command(command))

    def _look(self) -> None:
        """One timer for all calls: is the oldest too old?"""
        self._watch = None
        if not self._calls:
            return
        left = self._calls[0].sent_at + self._silence_max - self._loop.time()
        if left > 0:
            self._watch = self._loop.call_later(left, self._look)
        else:
            self._gave_up = TimeoutError(f"Redis was silent for {self._silence_max:g} s")
            self._transport.abort()

    def _answered(self, call: ScriptCall, answer: Any) -> None:
        if isinstance(answer, hiredis.ReplyError):
            self._refused(call, str(answer))
        elif not call.answer.done():
            try:
                call.answer.set_result(call.read(answer))
            except Exception as error:
                self.retire()
                self._on_trouble(InvalidResponse("Redis answered a script with something else"))
                unknown = OutcomeUnknown("the counters answered what nobody understands")
                unknown.__cause__ = error
                call.fail(unknown)

    def _refused(self, call: ScriptCall, reason: str) -> None:
        if reason.startswith("NOSCRIPT"):
            self._write(call, ("EVAL", call.script.source, *call.arguments))
            return
        self.retire()  # it may be a replica now, or on its way out: the next connection may find better
        self._on_trouble(reason)
        error: HoldfastError = Unavailable(f"the counters refuse to count: {reason}")
        if call.script.sha in reason:  # it was running: what it wrote before it broke off stays
            error = OutcomeUnknown("the counters broke off while they counted")
        call.fail(error)
