"""A worker's session at a PostgreSQL store; see ``contract.WorkerSession``.

A session owns partitions, a heartbeat and a sweep over the table of jobs. It has one
connection for its calls, one to listen for notifications, and one in the heartbeat's
thread. Handlers' transactions take connections from a pool.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg

from holdfast import telemetry
from holdfast.bounds import positive
from holdfast.clock import Clock, wait_at_most
from holdfast.drivers.postgres import connect
from holdfast.drivers.statements import statements
from holdfast.errors import OutcomeUnknown, Unavailable
from holdfast.work.contract import (
    INBOX_SECONDS,
    Claimed,
    ClaimRequest,
    JobGone,
    LeaseLost,
    Owners,
    Report,
    Rewound,
    TransactionEnded,
)
from holdfast.work.job import (
    CRASHES_MAX,
    Job,
)
from holdfast.work.postgres.encoding import (
    block_of,
    claim_arguments,
    owned_bits,
    report_arguments,
    unpack,
)
from holdfast.work.postgres.errors import CUT_OFF, FOREIGN, GIVEN_UP, cut_off, translate, translated
from holdfast.work.postgres.heartbeat import Beat, WorkerHeartbeat
from holdfast.work.postgres.sweep import PollInterval, Sweep

SQL = statements("holdfast.work.postgres")
_CHANNEL = "holdfast_work"
_SEEN_BATCH = 1000
_SEEN_BATCHES_MAX = 20
"""Per call of ``owners``, so 4,000 ids a second: more than an inbox takes in for long.
"""
_LOST = "this worker was declared dead; its jobs belong to others now"


@dataclass(frozen=True, slots=True)
class WorkerSessionSettings:
    """A session without a heartbeat for ``no_start_after_seconds`` starts no jobs;
    after ``dead_after_seconds`` other workers take over its partitions.
    """

    beat_seconds: float = 5.0
    dead_after_seconds: float = 20.0
    no_start_after_seconds: float = 15.0
    stuck_after_seconds: float = 30.0
    call_timeout_seconds: float = 10.0

    def __post_init__(self) -> None:
        positive(self, *self.__slots__)
        if not self.beat_seconds < self.no_start_after_seconds < self.dead_after_seconds:
            raise ValueError("beat_seconds < no_start_after_seconds < dead_after_seconds must hold")


@dataclass(frozen=True, slots=True)
class Pools:
    """One pool for short ``calls``, one for the ``transactions`` that handlers hold.

    With a single pool, handlers that hold all connections and call ``ctx.step`` or
    ``enqueue`` inside their transactions would deadlock.
    """

    calls: asyncpg.Pool
    transactions: asyncpg.Pool

    async def close(self) -> None:
        await self.transactions.close()
        await self.calls.close()


class PostgresSession:
    """See ``contract.WorkerSession``."""

    def __init__(
        self,
        who: tuple[int, str],
        url: str,
        pools: Pools,
        settings: WorkerSessionSettings,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self.instance, self._name = who
        self._url, self._pools, self._settings, self._clock, self._rng = (
            url,
            pools,
            settings,
            clock,
            rng,
        )
        self._sweep, self._poll_interval = Sweep(), PollInterval()
        self._partitions: dict[int, int] = {}
        self._lent: dict[int, Any] = {}
        self._stack = AsyncExitStack()
        self._connection: Any = None
        self._listener: Any = None
        self._listening: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._heartbeat = WorkerHeartbeat(
            self._beat_connection,
            clock,
            interval_seconds=settings.beat_seconds,
            stuck_after_seconds=settings.stuck_after_seconds,
        )

    @classmethod
    async def join(
        cls,
        name: str,
        url: str,
        pools: Pools,
        settings: WorkerSessionSettings,
        clock: Clock,
        rng: random.Random,
    ) -> PostgresSession:
        instance = await pools.calls.fetchval(SQL["join"], name)
        session = cls((instance, name), url, pools, settings, clock, rng)
        await session._stack.enter_async_context(session._heartbeat.beating())
        return session

    @property
    def may_start(self) -> bool:
        fresh = self._heartbeat.confirmed_age() < self._settings.no_start_after_seconds
        return fresh and not self._heartbeat.lost

    def fence(self, job: Job) -> int:
        return self._partitions.get(job.partition, 0)

    async def process(self, report: Report, request: ClaimRequest) -> Claimed:
        sent_at = self._clock.monotonic()
        sweep = self._sweep
        async with self._call() as connection:
            values = (
                *report_arguments(self.instance, report, self._rng),
                *claim_arguments(report, request, self._sweep, self._partitions),
            )
            row = await connection.fetchrow(
                SQL["process"], *values, timeout=self._settings.call_timeout_seconds
            )
        if row["lost"]:
            raise LeaseLost(_LOST)
        self._heartbeat.confirm(sent_at)
        claimed = Claimed(
            notice=row["noticed"], next_due_seconds=row["due_in"], busy=row["busy"] or []
        )
        if row["overflow"]:
            claimed.notice = True
        elif row["snapshot"] is not None and sweep is self._sweep:
            sweep.advance(int(row["xid"]), row["snapshot"], row["read_through"] or 0)
            claimed.through = sweep.through
            unpack(row, claimed)
        if request.wake_on_enqueue and row["snapshot"] is not None and row["seqs"] is None:
            self._poll_interval.found_nothing(int(row["xid"]), row["snapshot"])
            due = (claimed.next_due_seconds, self._poll_interval.next_poll_seconds)
            claimed.next_due_seconds = min(
                (seconds for seconds in due if seconds is not None), default=None
            )
        else:
            self._poll_interval.found_something()
        return claimed

    async def rewind(self) -> Rewound:
        self._sweep = Sweep()
        owned = owned_bits(self._partitions)
        async with self._call() as connection:
            await connection.execute(SQL["calls_over"], self.instance)
            blocks = [block_of(row) for row in await connection.fetch(SQL["blocks"], owned)]
            rows = await connection.fetch(SQL["backlogs"], owned)
            return Rewound(
                blocks, {row["stream"]: (row["type"], row["destination"]) for row in rows}
            )

    async def step(self, job: Job, stages: int) -> None:
        with translated():
            values = (job.seq, stages, job.partition, self.instance)
            _check(await self._pools.calls.fetchrow(SQL["step"], *values))

    @asynccontextmanager
    async def transaction(self, job: Job) -> AsyncIterator[Any]:
        own: BaseException | None = None  # what the handler itself raises is not translated
        closed = False  # whether the handler closed it; later the pool closes a lost connection too
        try:
            async with self._pools.transactions.acquire() as connection, connection.transaction():
                xid = await connection.fetchval(SQL["transaction"])
                was_closed = connection.was_closed
                self._lent[job.seq] = connection
                try:
                    yield connection
                except BaseException as error:
                    own = error
                    raise
                finally:
                    closed = was_closed()
                    if self._lent.get(job.seq) is connection:
                        del self._lent[job.seq]
                row = await connection.fetchrow(
                    SQL["finish"], job.seq, job.partition, self.instance, xid
                )
                if not row["same"]:
                    raise TransactionEnded
                _check(row)
        except FOREIGN as error:
            if error is own:
                raise
            if closed:
                raise own or TransactionEnded("the connection is closed") from error
            if not isinstance(error, (*GIVEN_UP, *CUT_OFF)):
                # the commit refuses the handler's own data: a deferred constraint, for
                # example
                raise
            raise translate(error) from error

    def revoke(self, job: Job) -> None:
        connection = self._lent.pop(job.seq, None)
        if connection is not None:
            connection.terminate()  # the pool can open another one at once

    async def breakers(
        self, opened: Mapping[str, float], closed: Sequence[str]
    ) -> Mapping[str, float]:
        async with self._call() as connection:
            if closed:
                await connection.execute(SQL["close_breakers"], list(closed))
            for job_type, seconds in opened.items():
                await connection.execute(SQL["open_breaker"], job_type, seconds, self._name)
            rows = await connection.fetch(SQL["open_breakers"])
            return {row["type"]: row["seconds"] for row in rows}

    async def owners(self) -> Owners:
        async with self._call() as connection:
            await connection.execute(
                SQL["bury_dead"], self._settings.dead_after_seconds, CRASHES_MAX
            )
            for _ in range(_SEEN_BATCHES_MAX):
                forget = (SQL["forget_seen"], INBOX_SECONDS, _SEEN_BATCH)
                if await connection.execute(*forget) != f"DELETE {_SEEN_BATCH}":
                    break
            alive = [row["id"] for row in await connection.fetch(SQL["alive"])]
            by_partition = {
                row["id"]: row["owner"] for row in await connection.fetch(SQL["owners"])
            }
        if self.instance not in alive:
            raise LeaseLost(_LOST)
        return Owners(alive, by_partition)

    async def take(self, partitions: Sequence[int]) -> Mapping[int, int]:
        async with self._call() as connection:
            rows = await connection.fetch(SQL["take"], self.instance, list(partitions))
        self._partitions.update({row["id"]: row["epoch"] for row in rows})
        return dict(self._partitions)

    async def release_partitions(self, partitions: Sequence[int]) -> None:
        for partition in partitions:
            self._partitions.pop(partition, None)
        async with self._call() as connection:
            await connection.execute(SQL["give"], self.instance, list(partitions))

    async def wait(self, timeout_seconds: float) -> bool:
        if (self._listener is None or self._listener.is_closed()) and (
            not self._listening or self._listening.done()
        ):
            # In its own task, because connecting may take longer than a wait.
            self._listening = asyncio.create_task(self._listen())
        try:
            return await wait_at_most(self._woken, timeout_seconds)
        finally:
            self._woken.clear()

    def wake(self) -> None:
        self._woken.set()

    async def stop_heartbeat(self) -> None:
        """Other workers take this one for dead once its last beat is too old."""
        await self._stack.aclose()

    async def leave(self) -> None:
        await self.stop_heartbeat()
        if self._listening is not None:
            self._listening.cancel()
        try:
            async with self._call() as connection:
                await connection.execute(SQL["leave"], self.instance)
                await connection.execute(SQL["bury_left"], CRASHES_MAX, self.instance)
        except (OutcomeUnknown, Unavailable):
            pass  # the heartbeat has stopped, so other workers notice
        self._terminate_connections()

    def report_before_exit(self, report: Report, culprit: int | None) -> None:
        asyncio.run(self._report_before_exit(report, culprit))

    async def _report_before_exit(self, report: Report, culprit: int | None) -> None:
        with translated():
            async with asyncio.timeout(self._settings.call_timeout_seconds):
                connection = await connect(self._url)
                async with connection.transaction():
                    values = (
                        *report_arguments(self.instance, report, self._rng),
                        *claim_arguments(report, ClaimRequest(), self._sweep, self._partitions),
                    )
                    if (await connection.fetchrow(SQL["process"], *values))["lost"]:
                        raise LeaseLost(_LOST)
                    if culprit is not None:
                        await connection.execute(SQL["count_crash"], culprit)
                        await connection.execute(SQL["leave"], self.instance)
                    await connection.execute(SQL["bury_left"], CRASHES_MAX, self.instance)

    def _terminate_connections(self) -> None:
        for connection in (self._connection, self._listener):
            if connection is not None:
                connection.terminate()

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[Any]:
        """The session's own connection, reopened after a loss; translates errors."""
        try:
            if self._connection is None or self._connection.is_closed():
                async with asyncio.timeout(self._settings.call_timeout_seconds):
                    self._connection = await connect(self._url)
        except FOREIGN as error:
            raise Unavailable(f"cannot connect to PostgreSQL: {error}") from error
        try:
            yield self._connection
        except FOREIGN as error:
            if cut_off(error):
                self._connection.terminate()
            raise translate(error) from error
        except asyncio.CancelledError:
            self._connection.terminate()
            raise

    async def _listen(self) -> None:
        """Listen for notifications; if that fails, polling is enough."""
        listener: Any = None
        try:
            async with asyncio.timeout(self._settings.call_timeout_seconds):
                listener = await connect(self._url)
                await listener.add_listener(_CHANNEL, self._on_notification)
            self._listener = listener
            self._woken.set()  # earlier notifications were missed
        except FOREIGN as error:
            telemetry.log.warning(
                "work.listener_interrupted", error=str(error) or type(error).__name__
            )
        finally:
            if listener is not None and self._listener is not listener:
                listener.terminate()

    def _on_notification(self, _connection: Any, _pid: int, _channel: str, payload: str) -> None:
        if payload == str(self.instance):
            self._woken.set()

    @asynccontextmanager
    async def _beat_connection(self) -> AsyncIterator[Beat]:
        try:
            async with asyncio.timeout(self._settings.call_timeout_seconds):
                connection = await connect(self._url)
        except FOREIGN as error:
            raise OSError(str(error)) from error
        try:
            yield lambda: _beat(connection, self.instance)
        except FOREIGN as error:
            raise OSError(str(error)) from error
        finally:
            connection.terminate()


async def _beat(connection: Any, instance: int) -> bool:
    return await connection.fetchval(SQL["beat"], instance) is not None


def _check(row: Any) -> None:
    """Raise LeaseLost or JobGone unless the statement applied to the job."""
    if not row["owned"]:
        raise LeaseLost(_LOST)
    if not row["found"]:
        raise JobGone
