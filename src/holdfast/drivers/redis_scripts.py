"""Script calls over one pipelined connection to Redis; replies come in call order.

redis-py opens it, with TLS, AUTH and SELECT. From then on we own its transport:
redis-py's streams, timeouts and coroutines cost more per reply than the reply itself,
and a node gets a thousand replies a second.

``subject`` is what the scripts keep ("the counters"), as errors name it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any, Final

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import InvalidResponse, RedisError

from holdfast.drivers.redis import UnfitRedis, check_server, connection_pool
from holdfast.errors import BadSetting, HoldfastError, OutcomeUnknown, Unavailable

_NOT_YET: Final = object()
CHECK_SECONDS = 2.0
"""How long startup waits to find out whether Redis is fit."""


class Script:
    """A Lua source and the digest by which Redis caches it: the files ``names`` in the
    folder ``lua`` of a package, one after the other.
    """

    def __init__(self, package: str, *names: str) -> None:
        folder = files(package) / "lua"
        self.source = "\n".join((folder / f"{name}.lua").read_text() for name in names)
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


class ScriptCall:
    """A script call; ``answer`` gets the reply as ``read`` decodes it."""

    __slots__ = ("answer", "arguments", "read", "script", "sent_at")

    def __init__(
        self,
        script: Script,
        keys: list[bytes],
        arguments: tuple[Any, ...],
        read: Callable[[Any], Any],
    ):
        self.script = script
        self.arguments = (len(keys), *keys, *arguments)
        self.read = read
        self.sent_at = 0.0
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Pipe(asyncio.Protocol):
    """One connection; the caller bounds the number of calls in flight.

    ``usable``: calls may be sent. ``on_trouble`` gets the reason of each failure.

    No call is sent twice, because a connection that breaks after the send leaves the
    outcome unknown. The one exception is NOSCRIPT: then Redis ran nothing. A reply
    whose caller has gone is ignored.
    """

    def __init__(
        self,
        connection: AbstractConnection,
        subject: str,
        silence_max_seconds: float,
        on_trouble: Callable[[Exception | str], None],
    ) -> None:
        """Takes over the open ``connection``; closes it if Redis is silent too long.
        ConnectionError if it is lost already: nobody would notice that later.
        """
        reader, writer = connection._reader, connection._writer
        if writer is None or writer.transport.is_closing():
            raise ConnectionError("Redis closed the connection")
        connection._reader = connection._writer = None
        self._streams = reader, writer  # a collected stream would close its transport
        self._transport = writer.transport
        self._transport.set_protocol(self)
        self._loop = asyncio.get_running_loop()
        self._subject = subject
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
        """Close the connection once every call in flight is answered."""
        self.usable = False
        if not self._calls:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed(data)
            while (answer := self._parser.gets()) is not _NOT_YET:
                self._answered(self._calls.popleft(), answer)
        except (hiredis.ProtocolError, IndexError):  # not Redis, or a reply to no call
            self._gave_up = InvalidResponse("what answers is no Redis")
            self._transport.abort()
        if not self.usable:
            self.retire()

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        if self._watch is not None:
            self._watch.cancel()
        if self._calls:
            self._on_trouble(
                self._gave_up or error or ConnectionError("Redis closed the connection")
            )
        while self._calls:
            self._calls.popleft().fail(OutcomeUnknown(f"{self._subject} did not answer"))

    def _write(self, call: ScriptCall, command: tuple[Any, ...]) -> None:
        call.sent_at = self._loop.time()
        if self._watch is None:
            self._watch = self._loop.call_later(self._silence_max, self._look)
        self._calls.append(call)
        self._transport.write(hiredis.pack_command(command))

    def _look(self) -> None:
        """Check the oldest call against its deadline: one timer for all calls."""
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
                unknown = OutcomeUnknown(f"{self._subject} answered what nobody understands")
                unknown.__cause__ = error
                call.fail(unknown)

    def _refused(self, call: ScriptCall, reason: str) -> None:
        if reason.startswith("NOSCRIPT"):
            self._write(call, ("EVAL", call.script.source, *call.arguments))
            return
        self.retire()  # it may be a replica now, or stopping: try a new connection
        self._on_trouble(reason)
        error: HoldfastError = Unavailable(f"{self._subject} refused the call: {reason}")
        if call.script.sha in reason:  # it failed while running: its writes so far stay
            error = OutcomeUnknown(f"{self._subject} broke off during the call")
        call.fail(error)


class ScriptRunner:
    """Runs scripts on the server or the service of a URL, which must be fit to keep
    what the scripts write. Opens a connection when one is needed.

    ``on_trouble`` gets the reason of each failure.
    """

    def __init__(
        self,
        url: str,
        subject: str,
        on_trouble: Callable[[Exception | str], None],
        *,
        connect_timeout_seconds: float = 1.0,
        socket_timeout_seconds: float = 5.0,
    ) -> None:
        self._subject = subject
        self._on_trouble = on_trouble
        self._silence_max = socket_timeout_seconds
        self._opening: asyncio.Task[Pipe] | None = None
        self.pipe: Pipe | None = None
        self._connections = connection_pool(
            url,
            protocol=2,  # we need nothing of 3, which also pushes messages we did not ask for
            socket_connect_timeout=connect_timeout_seconds,
            socket_timeout=socket_timeout_seconds,
        )

    def run(
        self,
        script: Script,
        keys: list[bytes],
        arguments: tuple[Any, ...],
        read: Callable[[Any], Any],
    ) -> Awaitable[Any]:
        """If there is a connection, the call has been sent when this returns."""
        call = ScriptCall(script, keys, arguments, read)
        pipe = self.pipe
        return pipe.send(call) if pipe is not None and pipe.usable else self._connect_and_run(call)

    async def require_fit(self, setting: str, seconds: float = CHECK_SECONDS) -> None:
        """BadSetting, which names the setting, if Redis answers and is unfit. It may be
        unavailable: each connection checks again.
        """
        try:
            async with asyncio.timeout(seconds):
                (await self._open()).retire()
        except UnfitRedis as error:
            if error.fatal:
                raise BadSetting(f"{setting}: {error}") from None
            self._on_trouble(error)
        except (RedisError, OSError) as error:
            self._on_trouble(error)

    def retire(self) -> None:
        """The next call opens another connection, which checks the server."""
        if self.pipe is not None:
            self.pipe.retire()

    async def aclose(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        self.retire()

    async def _connect_and_run(self, call: ScriptCall) -> Any:
        """Open one connection for all waiters; cancelling one does not end it."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(self._opened)
        try:
            pipe = await asyncio.shield(self._opening)
        except (RedisError, OSError) as error:
            raise Unavailable(f"{self._subject} cannot be reached") from error
        if not pipe.usable:  # lost before this task went on
            raise Unavailable(f"{self._subject} cannot be reached")
        return await pipe.send(call)

    async def _open(self) -> Pipe:
        make: Callable[[], AbstractConnection] = self._connections.make_connection
        connection = make()
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            await check_server(connection)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return Pipe(connection, self._subject, self._silence_max, self._on_trouble)

    def _opened(self, opening: asyncio.Task[Pipe]) -> None:
        self._opening = None
        if opening.cancelled():
            return
        error = opening.exception()
        if error is None:
            self.pipe = opening.result()
        elif isinstance(error, (RedisError, OSError)):
            self._on_trouble(error)
