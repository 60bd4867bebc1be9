"""Counters in Redis, shared by the nodes of a region: one script call decides up to 256 keys at one moment.

Nothing is ever sent twice: a connection that breaks after the send leaves the outcome unknown. The one exception
is NOSCRIPT, by which Redis says that it ran nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import chain, islice
from typing import Any

import msgspec
from hiredis import pack_command
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from holdfast.errors import OutcomeUnknown, Unavailable
from holdfast.limits.algorithms import CODES, Reading, Terms
from holdfast.limits.counters.contract import KEYS_PER_CALL_MAX, Adjustment, Ask, Key, Taken
from holdfast.limits.rules import Stamp

NAMES_MAX = 65_536
"""Names of counters remembered; when full they are forgotten and made again."""

_NUMBERS_PER_READING = 6


class Script:
    """A Lua source and the name under which Redis remembers it."""

    def __init__(self, *names: str) -> None:
        folder = files("holdfast.limits.counters") / "lua"
        self.source = "\n".join((folder / f"{name}.lua").read_text() for name in names)
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


_answer = msgspec.msgpack.Decoder(list[Any])

DECIDE = Script("head", *CODES, "tail")
ANNOUNCE = Script("announce")


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """``connections_max`` idle connections are kept; the limiter's own deadline is shorter than these timeouts."""

    url: str = "redis://127.0.0.1:6379/0"
    prefix: str = "rl"
    connections_max: int = 8
    connect_timeout_seconds: float = 1.0
    socket_timeout_seconds: float = 5.0

    def __post_init__(self) -> None:
        if not self.prefix or self.connections_max < 1:
            raise ValueError("prefix must not be empty and connections_max must be at least 1")


class RedisCounters:
    """See ``contract``. Close it with ``aclose``."""

    immediate = False

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._names: dict[Key, bytes] = {}
        self._idle: list[AbstractConnection] = []
        self._connections: ConnectionPool = ConnectionPool.from_url(
            settings.url,
            socket_connect_timeout=settings.connect_timeout_seconds,
            socket_timeout=None,  # its timer for each write and each read is a task; ours is one for both
            retry=Retry(NoBackoff(), 0),
        )

    def take_now(self, key: Key, terms: Terms, cost: int, hold: str = "") -> Reading:
        raise Unavailable("these counters are a round trip away")

    def look_now(self, key: Key, terms: Terms, count: int) -> Reading | None:
        raise Unavailable("these counters are a round trip away")

    async def take(self, entries: Sequence[Sequence[Ask]]) -> Taken:
        request = _Request()
        answer = await self._decide(request, request.entries(entries), [])
        return Taken(answer[0], _readings(answer, entries))

    async def adjust(self, adjustments: Sequence[Adjustment]) -> None:
        request = _Request()
        await self._decide(request, [], [request.adjustment(each) for each in adjustments])

    async def announce(self, node: str, ttl_seconds: float) -> int:
        key = f"{self._settings.prefix}:nodes".encode()
        count: int = await self._run(ANNOUNCE, [key], node, int(ttl_seconds * 1000))
        return count

    async def aclose(self) -> None:
        while self._idle:
            await self._idle.pop().disconnect(nowait=True)

    async def _decide(self, request: _Request, entries: list[Any], adjustments: list[Any]) -> list[Any]:
        assert len(request.keys) <= KEYS_PER_CALL_MAX
        blob = msgspec.msgpack.encode((request.terms, entries, adjustments))
        known = self._names.get
        answer = await self._run(DECIDE, [known(key) or self._name(key) for key in request.keys], blob)
        try:
            return _answer.decode(answer)
        except msgspec.MsgspecError as error:
            raise OutcomeUnknown("the counters answered what nobody understands") from error

    def _name(self, key: Key) -> bytes:
        """Subjects are hashed: of any length, and no address or user id is to be read in Redis."""
        subject = hashlib.blake2b(key[1].encode(), digest_size=12).hexdigest()
        if len(self._names) >= NAMES_MAX:
            self._names.clear()
        name = self._names[key] = f"{self._settings.prefix}:{key[0]}{subject}".encode()
        return name

    async def _run(self, script: Script, keys: list[bytes], *arguments: Any) -> Any:
        try:
            connection = await self._connected()
        except (RedisError, OSError) as error:
            raise Unavailable("the counters cannot be reached") from error
        try:
            async with asyncio.timeout(self._settings.socket_timeout_seconds):
                answer = await _evaluate(connection, script, keys, arguments)
        except ResponseError as error:
            await connection.disconnect(nowait=True)
            if script.sha in str(error):  # it was running: what it wrote before it broke off stays
                raise OutcomeUnknown("the counters broke off while they counted") from error
            raise Unavailable("the counters refuse to count") from error
        except (RedisError, OSError) as error:
            raise OutcomeUnknown("the counters did not answer") from error
        if len(self._idle) < self._settings.connections_max:
            self._idle.append(connection)
        else:
            await connection.disconnect(nowait=True)
        return answer

    async def _connected(self) -> AbstractConnection:
        """A connection of our own. One that the server has closed in the meantime is left."""
        while self._idle:
            connection = self._idle.pop()
            if not await connection.can_read():
                return connection
            await connection.disconnect(nowait=True)
        fresh: AbstractConnection = self._connections.make_connection()  # type: ignore[no-untyped-call]
        await fresh.connect()  # type: ignore[no-untyped-call]
        return fresh


async def _evaluate(
    connection: AbstractConnection, script: Script, keys: list[bytes], arguments: tuple[Any, ...]
) -> Any:
    """Send and read. Whatever interrupts this, cancellation included, closes the connection."""
    try:
        await connection.send_packed_command(pack_command(("EVALSHA", script.sha, len(keys), *keys, *arguments)))
        return await connection.read_response()
    except NoScriptError:
        await connection.send_packed_command(pack_command(("EVAL", script.source, len(keys), *keys, *arguments)))
        return await connection.read_response()
    except ResponseError:
        raise
    except BaseException:
        await connection.disconnect(nowait=True)
        raise


class _Request:
    """Numbers each key and each rule once, from 1 as Lua does. Terms are told apart by identity while it lives."""

    def __init__(self) -> None:
        self.keys: dict[Key, int] = {}
        self.terms: list[tuple[int, int, int, int, float, int]] = []
        self._numbers: dict[int, int] = {}

    def entries(self, entries: Sequence[Sequence[Ask]]) -> list[Any]:
        """Flat: how many asks, then seven values for each."""
        packed: list[Any] = []
        keys, terms = self.keys, None
        for entry in entries:
            packed.append(len(entry))
            for ask in entry:
                if ask.terms is not terms:
                    terms, number = ask.terms, self._terms(ask.terms)
                key = keys.setdefault(ask.key, len(keys) + 1)
                packed += (key, number, ask.cost, ask.times, ask.want, ask.hold, ask.spent)
        return packed

    def adjustment(self, each: Adjustment) -> list[Any]:
        return [self.keys.setdefault(each.key, len(self.keys) + 1), self._terms(each.terms), *each[2:]]

    def _terms(self, terms: Terms) -> int:
        number = self._numbers.get(id(terms))
        if number is None:
            self.terms.append((CODES[terms.algorithm], *terms.stamp, terms.limit, terms.window_ms, terms.capacity))
            number = self._numbers[id(terms)] = len(self.terms)
        return number


def _readings(answer: list[Any], entries: Sequence[Sequence[Ask]]) -> list[tuple[Reading, ...]]:
    newer = [(limit, Stamp(epoch, version)) for limit, epoch, version in answer[1]]
    columns = [answer[at::_NUMBERS_PER_READING] for at in range(2, 2 + _NUMBERS_PER_READING)]
    told = []
    for ask, admitted, remaining, reset_ms, wait_ms, leased, by in zip(chain(*entries), *columns, strict=True):
        limit, stamp = newer[by - 1] if by else (ask.terms.limit, ask.terms.stamp)
        told.append(Reading(admitted, remaining, reset_ms, wait_ms, leased, limit, stamp))
    if len(told) == len(entries):
        return [(reading,) for reading in told]
    readings = iter(told)
    return [tuple(islice(readings, len(entry))) for entry in entries]
