"""The pool of all nodes in Redis: one script call for each call (``lua/pool.lua``).

Wake-ups come by SUBSCRIBE, on one channel for each node. A message is
``queue:results:{reply id}``, a space and ``SIGNAL:DONE`` (a grant) or
``SIGNAL:CANCEL``.

Redis sees tenants and users as hashes: they have any length, and it must show no user's
id.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final
from zlib import crc32

import msgspec

from holdfast import telemetry
from holdfast.drivers.redis import (
    RedisReason,
    UnfitRedis,
    check_info,
    read_info,
    trouble_of,
)
from holdfast.drivers.redis_scripts import Script, ScriptRunner
from holdfast.drivers.redis_subscription import ChannelSubscription
from holdfast.errors import Unavailable
from holdfast.streaming.pool.contract import (
    Admit,
    Admitted,
    CancelElsewhere,
    Confirm,
    Locate,
    Move,
    NodeBeat,
    PoolAnswer,
    PoolOperation,
    PoolRequest,
    PoolSizes,
    PoolView,
    QueueBounds,
    Release,
)

PREFIX: Final = "replies:"
ADDRESS: Final = "queue:results:"
GRANTED: Final = "SIGNAL:DONE"
CANCELLED: Final = "SIGNAL:CANCEL"

CHECK_AGAIN_SECONDS = 10.0
"""How often a heartbeat checks for eviction, which can be switched on at any time."""
NAMES_MAX = 65_536
"""Hashes that are kept; when full, all are dropped and computed again."""

POOL, INFO = (Script("holdfast.streaming.pool", name) for name in ("pool", "info"))
_CODES: Final[dict[type[PoolOperation], int]] = {
    Admit: 1,
    Confirm: 2,
    Move: 3,
    Release: 4,
    CancelElsewhere: 5,
    Locate: 6,
}
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Any]).decode


class RedisPool:
    """``contract.Pool``. Close it with ``close``."""

    def __init__(
        self,
        url: str,
        sizes: PoolSizes,
        bounds: QueueBounds,
        *,
        prefix: str = PREFIX,
        clock_ms: Callable[[], int] | None = None,
    ) -> None:
        """``clock_ms`` replaces the time of Redis, for tests."""
        self._url = url
        self._prefix = prefix
        self._clock_ms = clock_ms
        self._settings = _encode(
            (
                sizes.total,
                sizes.providers,
                bounds.waiting_max,
                bounds.waiting_per_tenant,
                bounds.waiting_per_user,
            )
        )
        self._keys = [f"{prefix}pool:state".encode()]
        self._names: dict[tuple[str, str], tuple[str, str]] = {}
        self._check_again_at = 0.0
        self._scripts = ScriptRunner(url, "the pool of replies", self._on_trouble)
        self._subscriptions: list[ChannelSubscription] = []
        self.trouble: tuple[RedisReason, str] | None = None
        """Why the last call failed that did."""

    async def check(self) -> None:
        """BadSetting if it is reachable but unfit. Each connection checks again."""
        await self._scripts.require_fit("cluster.redis")

    async def call(self, node: str, operations: Sequence[PoolOperation]) -> Sequence[PoolAnswer]:
        packed = [self._packed_operation(each) for each in operations]
        answers = await self._run(node, "call", packed)
        return [_answer(each, answer) for each, answer in zip(operations, answers, strict=True)]

    def call_at_once(self, node: str, operations: Sequence[PoolOperation]) -> None:
        return None

    async def beat(self, node: str, beat: NodeBeat) -> PoolView:
        view = _view(await self._run(node, "beat", beat))
        await self._check_eviction()
        return view

    async def announce(
        self, node: str, leases: Sequence[PoolRequest], waiting: Sequence[PoolRequest]
    ) -> PoolView:
        lists = [[self._packed(each) for each in requests] for requests in (leases, waiting)]
        return _view(await self._run(node, "announce", lists))

    async def leave(self, node: str) -> None:
        await self._run(node, "leave", ())

    def listen(
        self, node: str, on_grant: Callable[[str], None], on_cancel: Callable[[str], None]
    ) -> None:
        words = {GRANTED: on_grant, CANCELLED: on_cancel}

        def on_message(data: bytes) -> None:
            address, _, word = data.decode().rpartition(" ")
            if word in words:
                words[word](address.removeprefix(ADDRESS))

        channel = f"{self._prefix}wake:{node}"
        self._subscriptions.append(
            ChannelSubscription(self._url, channel, on_message, self._on_trouble, "streaming")
        )

    async def close(self) -> None:
        for subscription in self._subscriptions:
            await subscription.close()
        await self._scripts.aclose()

    def _run(self, node: str, what: str, body: Any) -> Awaitable[Any]:
        now_ms = "" if self._clock_ms is None else str(self._clock_ms())
        arguments = (self._prefix, node, what, self._settings, _encode(body), now_ms)
        return self._scripts.run(POOL, self._keys, arguments, _read)

    def _packed_operation(self, operation: PoolOperation) -> tuple[Any, ...]:
        code = _CODES[type(operation)]
        if isinstance(operation, Admit):
            request = operation.request
            return code, *self._packed(request), request.capped, request.waiting_max
        return code, _encodable(operation.reply_id), *operation[1:]

    def _packed(self, request: PoolRequest) -> tuple[Any, ...]:
        tenant, user = self._hashed(request.tenant, request.user)
        reply_id, crc = request.reply_id, crc32(request.reply_id.encode())
        return reply_id, tenant, user, request.user_limit, request.pool, crc, request.head

    def _hashed(self, tenant: str, user: str) -> tuple[str, str]:
        names = self._names.get((tenant, user))
        if names is None:
            if len(self._names) >= NAMES_MAX:
                self._names.clear()
            names = _hash(tenant), _hash(f"{len(tenant)}:{tenant}{user}")
            self._names[tenant, user] = names
        return names

    async def _check_eviction(self) -> None:
        """Stop using a Redis that has become unfit; new connections check it too."""
        now = asyncio.get_running_loop().time()
        if now < self._check_again_at:
            return
        try:
            check_info(await self._scripts.run(INFO, [], (), read_info))
        except UnfitRedis as error:
            self._on_trouble(error)
            self._scripts.retire()
            raise Unavailable("the pool of replies is not fit to keep leases") from error
        self._check_again_at = now + CHECK_AGAIN_SECONDS

    def _on_trouble(self, error: Exception | str) -> None:
        self.trouble = trouble_of(error, self._url)
        telemetry.redis_failed("replies", self.trouble[0])


def _read(blob: bytes) -> Any:
    freed, answer = _decode(blob)
    for cause, count in freed:
        telemetry.reply_lease_freed(cause, count)
    return answer


def _answer(operation: PoolOperation, answer: Any) -> PoolAnswer:
    if not isinstance(operation, Admit | Move):
        return bool(answer) if not isinstance(operation, Locate) else str(answer)
    if isinstance(answer, str):
        return Admitted(False, full=answer)  # type: ignore[arg-type]  # one of FullCause
    return Admitted(True) if answer < 0 else Admitted(False, answer)


def _view(answer: list[Any]) -> PoolView:
    """Sorted as the memory's: a set of Redis has no order."""
    pool_id, same, granted, nodes, read, cancels, active, waiting, positions, rate = answer
    return PoolView(
        pool_id=pool_id,
        same=same,
        granted=granted,
        nodes=nodes,
        read_elsewhere=sorted(read),
        cancels=sorted(cancels),
        active=dict(active),
        waiting=dict(waiting),
        positions=dict(positions),
        grants_per_second=float(rate),
    )


def _encodable(reply_id: str) -> str:
    """Ids that are located come from anywhere; no reply's has a lone surrogate."""
    return reply_id if reply_id.isascii() else reply_id.encode(errors="replace").decode()


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()
