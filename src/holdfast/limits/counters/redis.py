"""Counters in Redis, shared by the nodes of a region: one script call decides up to 256 keys at one moment.

Nothing is ever sent twice: a connection that breaks after the send leaves the outcome unknown. The one exception
is NOSCRIPT, by which Redis says that it ran nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
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

_NUMBERS_PER_READING = 8


class Script:
    """A Lua source and the name under which Redis remembers it."""

    def __init__(self, *names: str) -> None:
        folder = files("holdfast.limits.counters") / "lua"
        self.source = "\n".join((folder / f"{name}.lua").read_text() for name in names)
        self.sha = hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest()


DECIDE = Script("head", *CODES, "tail")
ANNOUNCE = Script("announce")


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """``connections_max`` calls can be under way; the limiter's own deadline is shorter than these."""

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
        self._pool: ConnectionPool = ConnectionPool.from_url(
            settings.url,
            max_connections=settings.connections_max,
            socket_connect_timeout=settings.connect_timeout_seconds,
            socket_timeout=settings.socket_timeout_seconds,
            retry=Retry(NoBackoff(), 0),
        )

    def take_now(self, key: Key, terms: Terms, cost: int, hold: str = "") -> Reading:
        raise Unavailable("these counters are a round trip away")

    async def take(self, entries: Sequence[Sequence[Ask]]) -> Taken:
        request = _Request()
        packed = [request.entry(entry) for entry in entries]
        answer = await self._decide(request, packed, [])
        readings = iter(_readings(answer))
        return Taken(answer[0], [tuple(islice(readings, len(entry))) for entry in entries])

    async def adjust(self, adjustments: Sequence[Adjustment]) -> None:
        request = _Request()
        await self._decide(request, [], [request.adjustment(each) for each in adjustments])

    async def announce(self, node: str, ttl_seconds: float) -> int:
        key = f"{self._settings.prefix}:nodes".encode()
        count: int = await self._run(ANNOUNCE, [key], node, int(ttl_seconds * 1000))
        return count

    async def aclose(self) -> None:
        await self._pool.disconnect()

    async def _decide(self, request: _Request, entries: list[Any], adjustments: list[Any]) -> list[Any]:
        assert len(request.keys) <= KEYS_PER_CALL_MAX
        blob = msgspec.msgpack.encode((request.terms, entries, adjustments))
        answer = await self._run(DECIDE, [self._name(key) for key in request.keys], blob)
        decoded: list[Any] = msgspec.msgpack.decode(answer)
        return decoded

    def _name(self, key: Key) -> bytes:
        """Subjects are hashed: of any length, and no address or user id is to be read in Redis."""
        name = self._names.get(key)
        if name is None:
            subject = hashlib.blake2b(key[1].encode(), digest_size=12).hexdigest()
            if len(self._names) >= NAMES_MAX:
                self._names.clear()
            name = self._names[key] = f"{self._settings.prefix}:{key[0]}{subject}".encode()
        return name

    async def _run(self, script: Script, keys: list[bytes], *arguments: Any) -> Any:
        try:
            connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            raise Unavailable("the counters cannot be reached") from error
        try:
            return await self._evaluate(connection, script, keys, arguments)
        except ResponseError as error:
            raise Unavailable("the counters refuse to count") from error
        except (RedisError, OSError) as error:
            raise OutcomeUnknown("the counters did not answer") from error
        finally:
            await self._pool.release(connection)

    async def _evaluate(
        self, connection: AbstractConnection, script: Script, keys: list[bytes], arguments: tuple[Any, ...]
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

    def entry(self, entry: Sequence[Ask]) -> list[Any]:
        packed: list[Any] = []
        for ask in entry:
            key = self.keys.setdefault(ask.key, len(self.keys) + 1)
            packed += (key, self._terms(ask.terms), ask.cost, ask.times, ask.want, ask.hold)
        return packed

    def adjustment(self, each: Adjustment) -> list[Any]:
        return [self.keys.setdefault(each.key, len(self.keys) + 1), self._terms(each.terms), *each[2:]]

    def _terms(self, terms: Terms) -> int:
        number = self._numbers.get(id(terms))
        if number is None:
            self.terms.append((CODES[terms.algorithm], *terms.stamp, terms.limit, terms.window_ms, terms.capacity))
            number = self._numbers[id(terms)] = len(self.terms)
        return number


def _readings(answer: list[Any]) -> list[Reading]:
    stamps: dict[tuple[int, int], Stamp] = {}
    readings = []
    for at in range(1, len(answer), _NUMBERS_PER_READING):
        epoch_and_version = (answer[at + 6], answer[at + 7])
        stamp = stamps.get(epoch_and_version)
        if stamp is None:
            stamp = stamps[epoch_and_version] = Stamp(*epoch_and_version)
        admitted, remaining, reset_ms, wait_ms, leased, limit = answer[at : at + 6]
        readings.append(Reading(admitted, remaining, reset_ms, wait_ms, leased, limit, stamp))
    return readings
