"""Counters in Redis, shared by the nodes of a region: one script call decides up to 256 keys at one moment.

Nothing is ever sent twice: a connection that breaks after the send leaves the outcome unknown. The one exception
is NOSCRIPT, by which Redis says that it ran nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import msgspec
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from holdfast.errors import OutcomeUnknown, Unavailable
from holdfast.limits.algorithms import CODES, Reading, Terms
from holdfast.limits.counters.contract import KEYS_PER_CALL_MAX, Adjustment, Ask, Key, Taken
from holdfast.limits.rules import Stamp

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

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._pool: ConnectionPool = ConnectionPool.from_url(
            settings.url,
            max_connections=settings.connections_max,
            socket_connect_timeout=settings.connect_timeout_seconds,
            socket_timeout=settings.socket_timeout_seconds,
            retry=Retry(NoBackoff(), 0),
        )

    def take_now(self, key: Key, terms: Terms, cost: int) -> Reading | None:
        return None

    async def take(self, entries: Sequence[Sequence[Ask]]) -> Taken:
        request = _Request()
        packed = [request.entry(entry) for entry in entries]
        answer = await self._decide(request, packed, [])
        readings = iter(_readings(answer))
        return Taken(answer[0], [tuple(next(readings) for _ in entry) for entry in entries])

    async def adjust(self, adjustments: Sequence[Adjustment]) -> None:
        request = _Request()
        await self._decide(request, [], [request.adjustment(each) for each in adjustments])

    async def announce(self, node: str, ttl_seconds: float) -> int:
        key = f"{self._settings.prefix}:nodes"
        count: int = await self._run(ANNOUNCE, [key], node, ttl_seconds * 1000)
        return count

    async def aclose(self) -> None:
        await self._pool.disconnect()

    async def _decide(self, request: _Request, entries: list[Any], adjustments: list[Any]) -> list[Any]:
        keys = list(request.keys)
        assert len(keys) <= KEYS_PER_CALL_MAX
        blob = msgspec.msgpack.encode((list(request.terms), entries, adjustments))
        answer = await self._run(DECIDE, [self._name(key) for key in keys], blob)
        decoded: list[Any] = msgspec.msgpack.decode(answer)
        return decoded

    def _name(self, key: Key) -> str:
        """Subjects are hashed: of any length, and no address or user id is to be read in Redis."""
        subject = hashlib.blake2b(key[1].encode(), digest_size=12).hexdigest()
        return f"{self._settings.prefix}:{key[0]}{subject}"

    async def _run(self, script: Script, keys: list[str], *arguments: Any) -> Any:
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
        self, connection: AbstractConnection, script: Script, keys: list[str], arguments: tuple[Any, ...]
    ) -> Any:
        """Send and read. Whatever interrupts this, cancellation included, closes the connection."""
        try:
            await connection.send_command("EVALSHA", script.sha, len(keys), *keys, *arguments)
            return await connection.read_response()
        except NoScriptError:
            await connection.send_command("EVAL", script.source, len(keys), *keys, *arguments)
            return await connection.read_response()
        except ResponseError:
            raise
        except BaseException:
            await connection.disconnect(nowait=True)
            raise


class _Request:
    """Numbers each key and each rule once, from 1 as Lua does."""

    def __init__(self) -> None:
        self.keys: dict[Key, int] = {}
        self.terms: dict[tuple[int, int, int, int, float, int], int] = {}

    def entry(self, entry: Sequence[Ask]) -> list[Any]:
        packed: list[Any] = []
        for key, terms, cost, times, want, hold in entry:
            packed += (self._key(key), self._terms(terms), cost, times, want, hold)
        return packed

    def adjustment(self, each: Adjustment) -> list[Any]:
        return [self._key(each.key), self._terms(each.terms), *each[2:]]

    def _key(self, key: Key) -> int:
        return self.keys.setdefault(key, len(self.keys) + 1)

    def _terms(self, terms: Terms) -> int:
        algorithm, stamp, limit, window_ms, capacity = terms
        return self.terms.setdefault((CODES[algorithm], *stamp, limit, window_ms, capacity), len(self.terms) + 1)


def _readings(answer: list[Any]) -> list[Reading]:
    return [
        Reading._make((*answer[at : at + 6], Stamp(answer[at + 6], answer[at + 7])))
        for at in range(1, len(answer), _NUMBERS_PER_READING)
    ]
