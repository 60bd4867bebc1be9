"""Counters in Redis, shared by a region: one script call decides up to 256 keys."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import msgspec

from holdfast import telemetry
from holdfast.drivers.redis import UnfitRedis, check_info, trouble_of
from holdfast.drivers.redis_scripts import Script, ScriptRunner
from holdfast.errors import Unavailable
from holdfast.limits.algorithms import CODES, CounterReading, LimitParams
from holdfast.limits.counters.contract import (
    CHECK_AGAIN_SECONDS,
    KEYS_PER_CALL_MAX,
    NODE_NAMES_MAX,
    Adjustment,
    CounterKey,
    CounterRequest,
    CounterResponse,
    CountersTrouble,
    NodesAnnounced,
)
from holdfast.limits.rules import RuleVersion

_NUMBERS_PER_READING = 6


_answers = msgspec.msgpack.Decoder(list[Any])

DECIDE, ANNOUNCE, RESET = (
    Script("holdfast.limits.counters", *names)
    for names in (("head", *CODES, "tail"), ("announce",), ("reset",))
)

RESETS_REPORTED_SECONDS = 60.0
"""How long a reset is reported; a node cut off for longer may remember a refusal."""


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """The limiter's own deadline is shorter than these timeouts."""

    url: str = "redis://127.0.0.1:6379/0"
    prefix: str = "rl"
    connect_timeout_seconds: float = 1.0
    socket_timeout_seconds: float = 5.0
    check_seconds: float = 2.0
    """How long startup waits to find out whether Redis is fit to keep counters."""
    check_again_seconds: float = CHECK_AGAIN_SECONDS
    """How often a heartbeat checks for eviction, which can be switched on at any
    time."""
    names_max: int = 65_536
    """Names of counters that are kept; when full, all are dropped and computed
    again."""
    resets_max: int = 1_000
    """Resets that are reported; the oldest are dropped."""

    def __post_init__(self) -> None:
        if not self.prefix:
            raise ValueError("prefix must not be empty")


class RedisCounters:
    """See ``contract``. Close it with ``aclose``."""

    in_process = False

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._names: dict[CounterKey, bytes] = {}
        self._nodes, self._resets = (
            f"{settings.prefix}:{what}".encode() for what in ("nodes", "resets")
        )
        self._announced_at: bytes | str = "0"
        self._check_again_at = 0.0
        self._trouble: CountersTrouble | None = None
        self._scripts = ScriptRunner(
            settings.url,
            "the counters",
            self._failed,
            connect_timeout_seconds=settings.connect_timeout_seconds,
            socket_timeout_seconds=settings.socket_timeout_seconds,
        )

    async def check(self) -> None:
        """BadSetting if it is reachable but unfit. Each connection checks again."""
        await self._scripts.require_fit("limits.counters_url", self._settings.check_seconds)

    def take_now(
        self, key: CounterKey, params: LimitParams, cost: int, hold: str = "", times: int = 1
    ) -> CounterReading:
        raise Unavailable("these counters need a round trip")

    def peek_now(self, key: CounterKey, params: LimitParams, count: int) -> CounterReading | None:
        raise Unavailable("these counters need a round trip")

    def charge_now(self, key: CounterKey, params: LimitParams, amount: int) -> None:
        raise Unavailable("these counters need a round trip")

    def take(self, entries: Sequence[Sequence[CounterRequest]]) -> Awaitable[CounterResponse]:
        call = _PackedCall()
        return self._decide(call, call.entries(entries), [], partial(_taken, entries))

    async def adjust(self, adjustments: Sequence[Adjustment]) -> int:
        call = _PackedCall()
        packed = [call.adjustment(each) for each in adjustments]
        return sum((await self._decide(call, [], packed, _answers.decode))[2:])

    async def reset(self, key: CounterKey) -> bool:
        arguments = (int(RESETS_REPORTED_SECONDS * 1000), self._settings.resets_max)
        return bool(await self._run(RESET, [self.name(key), self._resets], arguments, int))

    def name(self, key: CounterKey) -> bytes:
        return self._names.get(key) or self._name(key)

    async def announce(self, node: str, ttl_seconds: float) -> NodesAnnounced:
        due = asyncio.get_running_loop().time() >= self._check_again_at
        said = (node, int(ttl_seconds * 1000), self._announced_at, NODE_NAMES_MAX, int(due))
        now, count, names, resets, info = await self._run(
            ANNOUNCE, [self._nodes, self._resets], said, list
        )
        self._announced_at = now
        if due:
            self._check_info(info)
            self._check_again_at = (
                asyncio.get_running_loop().time() + self._settings.check_again_seconds
            )
        return NodesAnnounced(
            count, tuple(name.decode(errors="replace") for name in names), frozenset(resets)
        )

    def take_trouble(self) -> CountersTrouble | None:
        trouble, self._trouble = self._trouble, None
        return trouble

    async def aclose(self) -> None:
        await self._scripts.aclose()

    def _decide(
        self,
        call: _PackedCall,
        entries: list[Any],
        adjustments: list[Any],
        read: Callable[[bytes], Any],
    ) -> Awaitable[Any]:
        assert len(call.keys) <= KEYS_PER_CALL_MAX
        blob = msgspec.msgpack.encode((call.params, entries, adjustments))
        known = self._names.get
        return self._run(
            DECIDE, [known(key) or self._name(key) for key in call.keys], (blob,), read
        )

    def _name(self, key: CounterKey) -> bytes:
        """Subjects are hashed: they have any length, and Redis must show no user id.

        A lone surrogate, which JSON can express and UTF-8 cannot, is a character like
        any other.
        """
        subject = hashlib.blake2b(key[1].encode(errors="surrogatepass"), digest_size=12).hexdigest()
        if len(self._names) >= self._settings.names_max:
            self._names.clear()
        name = self._names[key] = f"{self._settings.prefix}:{key[0]}{subject}".encode(
            errors="surrogatepass"
        )
        return name

    def _run(
        self,
        script: Script,
        keys: list[bytes],
        arguments: tuple[Any, ...],
        read: Callable[[Any], Any],
    ) -> Awaitable[Any]:
        """If there is a connection, the call has been sent when this returns."""
        return self._scripts.run(script, keys, arguments, read)

    def _check_info(self, info: bytes) -> None:
        """Stop using a Redis that has become unfit; new connections check it too."""
        try:
            check_info(info)
        except UnfitRedis as error:
            self._failed(error)
            self._scripts.retire()
            raise Unavailable("the counters are not fit to count") from error

    def _failed(self, error: Exception | str) -> None:
        self._trouble = CountersTrouble(*trouble_of(error, self._settings.url))
        telemetry.redis_failed("counters", self._trouble.reason)


class _PackedCall:
    """Numbers keys and rules from 1, as Lua does. Rules are compared by identity."""

    def __init__(self) -> None:
        self.keys: dict[CounterKey, int] = {}
        self.params: list[tuple[int, int, int, int, float, int, int]] = []
        self._numbers: dict[int, int] = {}

    def entries(self, entries: Sequence[Sequence[CounterRequest]]) -> list[Any]:
        """Flat: the number of requests, then seven values for each."""
        packed: list[Any] = []
        keys, params = self.keys, None
        for entry in entries:
            packed.append(len(entry))
            for request in entry:
                if request.params is not params:
                    params, number = request.params, self._number_of(request.params)
                key = keys.setdefault(request.key, len(keys) + 1)
                packed += (
                    key,
                    number,
                    request.cost,
                    request.times,
                    request.want,
                    request.hold,
                    request.spent,
                )
        return packed

    def adjustment(self, each: Adjustment) -> list[Any]:
        return [
            self.keys.setdefault(each.key, len(self.keys) + 1),
            self._number_of(each.params),
            *each[2:],
        ]

    def _number_of(self, params: LimitParams) -> int:
        number = self._numbers.get(id(params))
        if number is None:
            self.params.append(
                (
                    CODES[params.algorithm],
                    *params.stamp,
                    params.limit,
                    params.window_ms,
                    params.capacity,
                    params.store,
                )
            )
            number = self._numbers[id(params)] = len(self.params)
        return number


def _taken(entries: Sequence[Sequence[CounterRequest]], blob: bytes) -> CounterResponse:
    answer = _answers.decode(blob)
    return CounterResponse(answer[0], _readings(answer, entries))


def _readings(
    answer: list[Any], entries: Sequence[Sequence[CounterRequest]]
) -> list[tuple[CounterReading, ...]]:
    newer = [
        (limit, RuleVersion(epoch, version), capacity)
        for limit, epoch, version, capacity in answer[1]
    ]
    columns = [answer[at::_NUMBERS_PER_READING] for at in range(2, 2 + _NUMBERS_PER_READING)]
    readings = []
    for request, admitted, remaining, reset_ms, wait_ms, leased, by in zip(
        chain(*entries), *columns, strict=True
    ):
        limit, stamp, capacity = (
            newer[by - 1]
            if by
            else (request.params.limit, request.params.stamp, request.params.capacity)
        )
        readings.append(
            CounterReading(admitted, remaining, reset_ms, wait_ms, leased, limit, stamp, capacity)
        )
    if len(readings) == len(entries):  # one key each, as almost always
        return [(reading,) for reading in readings]
    in_order = iter(readings)
    return [tuple(islice(in_order, len(entry))) for entry in entries]
