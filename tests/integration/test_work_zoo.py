"""The handler zoo: whatever a handler does ends as an outcome of its own job.

One worker on each engine meets every misbehaviour, one after another. One rule judges
all of them: the job has a true outcome, then as many jobs as there are runners run side
by side (so all others run, and no runner is lost), the store is never blamed, and in
the end the worker is as fast as it was at the beginning.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from work_rigs import Opened, embedded_work, postgres_work, until

from holdfast.resilience import BreakerSettings
from holdfast.work.contract import JobGone, LeaseLost, RunEnded
from holdfast.work.failures import JobFailed
from holdfast.work.handlers import Context, Handlers
from holdfast.work.inspection import Query
from holdfast.work.job import JobDraft, Reason, Stage, State
from holdfast.work.worker import Worker, WorkerSettings

RUNNERS = 6
BATCH = 300
SETTINGS = WorkerSettings(
    concurrency=RUNNERS,
    poll_max_seconds=0.05,
    balance_seconds=0.5,
    cancel_seconds=0.15,
    drain_seconds=2,
    breaker=BreakerSettings(failure_threshold=1000),
)
DONE = "done"
Act = Callable[["Zoo", Context], Awaitable[Any]]


@dataclass
class Case:
    """``ends``: DONE, or the failure's reason; ``says`` is in its type or text;
    ``hasty``: its deadline is 0.15 s.
    """

    act: Act
    ends: Reason | str = Reason.HANDLER_EXCEPTION
    says: str = ""
    hasty: bool = False
    dead: bool = False


CASES: dict[str, Case] = {}


def case(
    *, of: list[Any] | None = None, **expected: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """List a misbehaviour, or one for each value ``of`` its last argument."""

    def register(act: Callable[..., Any]) -> Callable[..., Any]:
        for number, value in enumerate(of or [None]):
            name = act.__name__ if of is None else f"{act.__name__}-{number}"
            given = act if of is None else lambda zoo, ctx, value=value: act(zoo, ctx, value)
            CASES[name] = Case(given, **expected)
        return act

    return register


class Animal(msgspec.Struct):
    name: str


class Hasty(Animal): ...


class Good(msgspec.Struct):
    number: int
    meet: bool = False


class Zoo:
    """A worker in a thread with a loop of its own, and what the cases left in it."""

    def __init__(self, opened: Any) -> None:
        self._opened = opened
        self.ready = threading.Event()
        self._closing: asyncio.Event
        self.loop: asyncio.AbstractEventLoop
        self.o: Opened
        self.handlers = Handlers()
        self.barrier: asyncio.Barrier
        self.good = self.met = 0
        self.leaked: list[asyncio.Task[Any]] = []
        self.release = threading.Event()
        self.seconds = 0.0
        self.other: Context
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self.ready.wait(60)

    def judge_worker(self) -> None:
        """At the end it is as fast as before, and stops although some handlers hang."""
        seconds = min(self.do(self.batch()) for _ in range(3))
        assert seconds < 3 * self.seconds + 0.5, (
            f"{BATCH} jobs took {self.seconds:.2f} s before, {seconds:.2f} s after"
        )
        started = time.monotonic()
        self.loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(20)
        assert not self._thread.is_alive(), "the worker does not stop"
        assert time.monotonic() - started < SETTINGS.drain_seconds + SETTINGS.cancel_seconds + 5

    def do(self, work: Awaitable[Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, 30), self.loop).result(40)

    async def _main(self) -> None:
        self.loop, self._closing, self.barrier = (
            asyncio.get_running_loop(),
            asyncio.Event(),
            asyncio.Barrier(RUNNERS),
        )
        self.handlers.handle(Animal)(self._run)
        self.handlers.handle(Hasty, deadline_seconds=0.15)(self._run)
        self.handlers.handle(Good)(self._run_good)
        async with (
            self._opened() as self.o,
            Worker(self.o.store, self.handlers, settings=SETTINGS).running(),
        ):
            self.seconds = await self.batch()
            self.ready.set()
            await self._closing.wait()
        self.release.set()

    async def _run(self, ctx: Context, animal: Animal) -> Any:
        return await CASES[animal.name].act(self, ctx)

    async def _run_good(self, ctx: Context, good: Good) -> None:
        self.other = ctx
        if good.meet:
            await self.barrier.wait()
            self.met += 1
        else:
            self.good += 1

    async def batch(self) -> float:
        """Seconds for a batch of good jobs."""
        before, started = self.good, time.monotonic()
        await self.o.store.enqueue([self.handlers.draft(Good(n)) for n in range(BATCH)])
        await until(lambda: self.good >= before + BATCH)
        return time.monotonic() - started

    async def all_runners_meet(self) -> None:
        before = self.met
        await self.o.store.enqueue(
            [self.handlers.draft(Good(n, meet=True)) for n in range(RUNNERS)]
        )
        await until(lambda: self.met == before + RUNNERS)

    async def judge(self, name: str) -> None:
        wanted = CASES[name]
        kind = Hasty if wanted.hasty else Animal
        (seq,) = await self.o.store.enqueue([self.handlers.draft(kind(name))])
        entry = await self._outcome(
            seq, dead=wanted.dead or wanted.ends == Reason.VALIDATION_FAILURE
        )
        await self.all_runners_meet()
        if entry is None:
            assert wanted.ends == DONE, f"it was done, not {wanted.ends!r}"
        else:
            text = f"{entry.error_type}: {entry.error}"
            assert (entry.reason, entry.attempt) == (wanted.ends, 1), text
            assert wanted.says in text
            if entry.dead_at is None:
                await self.o.store.bury([seq], by="zoo", why="judged")
        leaked, self.leaked = self.leaked, []
        for task in leaked:
            with pytest.raises(RunEnded):
                await task

    async def _outcome(self, seq: int, *, dead: bool) -> Any:
        """The failed job; None if it is done."""
        async with asyncio.timeout(10):
            while True:
                waiting = await self.o.store.find(Query(seqs=[seq]))
                buried = await self.o.store.dead(Query(seqs=[seq]))
                if buried or not waiting:
                    return buried[0] if buried else None
                if waiting[0].state in (State.RETRY, State.PARKED) and not dead:
                    return waiting[0]
                await asyncio.sleep(0.005)


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def zoo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zoo]:
    path = tmp_path_factory.mktemp("zoo") / "work.db"
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_server").url
        made = Zoo(lambda: postgres_work(url))
    else:
        made = Zoo(lambda: embedded_work(path))
    assert len(CASES) >= 50
    made.start()
    yield made
    made.judge_worker()


def nothing() -> Any:
    return asyncio.sleep(0)


def changed(**values: Any) -> JobDraft:
    """A draft that was changed behind its own back after it was checked."""
    draft = JobDraft("Good", b'{"number":1}', "s")
    for name, value in values.items():
        object.__setattr__(draft, name, value)
    return draft


# Wrong arguments, refused where they are given.


@case(of=["payload", None, {"type": "Good"}, b"{}", 5, JobDraft], says="enqueued as a JobDraft")
async def enqueues_no_draft(zoo: Zoo, ctx: Context, value: Any) -> None:
    ctx.enqueue(value)


@case(
    of=[
        {"payload": "text"}, {"payload": bytearray(b"x")}, {"payload": None}, {"payload": 5},
        {"type": ""},
        {"type": None}, {"type": "a\x00b"}, {"type": "x" * 201}, {"stream": "\ud800"},
        {"stream": "a\x00"},
        {"stream": 5}, {"stream": ""}, {"destination": None}, {"destination": "a\x00"},
        {"source": "only"},
        {"delay_seconds": float("nan")}, {"delay_seconds": float("inf")}, {"delay_seconds": -1},
        {"delay_seconds": 1e300}, {"delay_seconds": 10**400}, {"delay_seconds": "5"},
        {"delay_seconds": None},
    ],
    says="InvalidArgument",
)  # fmt: skip
async def drafts_nonsense(zoo: Zoo, ctx: Context, value: dict[str, Any]) -> None:
    ctx.enqueue(JobDraft(**{"type": "Good", "payload": b"{}", **value}))


@case(ends=Reason.VALIDATION_FAILURE, says="bytes")
async def drafts_a_payload_beyond_the_bound(zoo: Zoo, ctx: Context) -> None:
    ctx.enqueue(JobDraft("Good", bytes(2 << 20)))


@case(of=["8", 3, 0, -1, 2**70, 32768, True, 8.0, None, float("nan"), [8]], says="is no stage")
async def steps_no_stage(zoo: Zoo, ctx: Context, value: Any) -> None:
    await ctx.step(value, nothing)


@case(of=["8", 5], says="is no stage")
async def asks_for_no_stage(zoo: Zoo, ctx: Context, value: Any) -> None:
    ctx.completed(value)


@case(of=[None, "action", asyncio.sleep])
async def steps_no_action(zoo: Zoo, ctx: Context, value: Any) -> None:
    await ctx.step(Stage.USER, value)


@case(of=["12", 2**70, 2**63, -1, 0, None, 1.5, True, [1], b"1"], says="is no job's sequence")
async def releases_no_job(zoo: Zoo, ctx: Context, value: Any) -> None:
    ctx.release(value)
    raise AssertionError("it was refused")


@case(says="at most")
async def releases_too_many(zoo: Zoo, ctx: Context) -> None:
    ctx.release(*range(1, 20_000))


@case(says="at most")
async def enqueues_too_many(zoo: Zoo, ctx: Context) -> None:
    for _ in range(2000):
        ctx.enqueue(JobDraft("Good", b"{}"))


@case(says="at most")
async def enqueues_too_much(zoo: Zoo, ctx: Context) -> None:
    for _ in range(20):
        ctx.enqueue(JobDraft("Good", bytes(1 << 20)))


# What passes by every check, refused by the store alone.


@case(
    of=[
        {"payload": "text"}, {"payload": ["list"]}, {"type": None}, {"type": b"bytes"},
        {"stream": "\ud800"},
        {"stream": b"bytes"}, {"destination": None}, {"delay_seconds": "soon"},
    ],
    says="the store refused the report",
)  # fmt: skip
async def enqueues_what_no_store_takes(zoo: Zoo, ctx: Context, value: dict[str, Any]) -> None:
    ctx.enqueue(changed(**value))


@case(of=["x", None, 2**70], says="the store refused the report")
async def breaks_its_own_stages(zoo: Zoo, ctx: Context, value: Any) -> None:
    ctx.stages = value
    raise RuntimeError("after that")


@case(says="after that")
async def breaks_its_own_releases(zoo: Zoo, ctx: Context) -> None:
    ctx.released.extend([2**70, "12"])  # type: ignore[list-item]
    raise RuntimeError("after that")


# What a handler can raise.


class PanicException(BaseException):
    """As Rust extensions raise it."""


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Loud(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class NoText(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


class Nameless(type):
    def __getattribute__(cls, name: str) -> Any:
        if name == "__qualname__":
            raise RuntimeError("no name")
        return super().__getattribute__(name)


class Odd(Exception, metaclass=Nameless): ...


class Asking(Exception):
    @property
    def retry_after_seconds(self) -> float:
        raise SystemExit(1)


def chain(length: int) -> Exception:
    error = ValueError("first")
    for _ in range(length):
        later = ValueError("later")
        later.__cause__ = error
        error = later
    return error


@case(
    of=[
        PanicException("panicked"), BaseExceptionGroup("g", [PanicException("p")]), GeneratorExit(),
        KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError("raised"),
        ExceptionGroup("g", [ValueError("v")]),
        RecursionError("deep"), MemoryError(), StopIteration(), StopAsyncIteration(), Silent(),
        Loud(), NoText(),
        Odd(), Asking(), ValueError("x" * (20 << 20)), ValueError("\x00\ud800"), chain(5000),
        LeaseLost("invented"),
        JobGone(), FileNotFoundError(2, "no such file"), OSError("no number"),
        UnicodeDecodeError("utf-8", b"", 0, 1, "x"),
        msgspec.DecodeError("somebody's page"), RunEnded(),
        ExceptionGroup("g", [ValueError("v")] * 10_000),
    ],
)  # fmt: skip
async def raises(zoo: Zoo, ctx: Context, value: BaseException) -> None:
    raise value


@case(
    of=[JobFailed("poison", "x"), JobFailed(None, "x")],  # type: ignore[arg-type]
    ends=Reason.UNKNOWN,
)
async def names_no_reason(zoo: Zoo, ctx: Context, value: BaseException) -> None:
    raise value


@case(of=[float("nan"), float("inf"), 10**400, "soon", -5], ends=Reason.THROTTLED)
async def asks_for_an_odd_wait(zoo: Zoo, ctx: Context, value: Any) -> None:
    raise JobFailed(Reason.THROTTLED, "x", retry_after_seconds=value)


@case(says="SystemExit")
async def exits(zoo: Zoo, ctx: Context) -> None:
    sys.exit(3)


@case(says="TypeError")
async def raises_no_exception(zoo: Zoo, ctx: Context) -> None:
    raise 5  # type: ignore[misc]  # noqa: B016 - that is the misbehaviour


@case(says="RecursionError")
async def recurses(zoo: Zoo, ctx: Context) -> None:
    def again() -> None:
        again()

    again()


# Cancelling.


@case(says="CancelledError")
async def cancels_itself(zoo: Zoo, ctx: Context) -> None:
    asyncio.current_task().cancel()  # type: ignore[union-attr]
    await asyncio.sleep(1)


@case(ends=DONE)
async def cancels_itself_and_returns(zoo: Zoo, ctx: Context) -> None:
    for _ in range(3):
        asyncio.current_task().cancel()  # type: ignore[union-attr]


@case(ends=DONE)
async def cancels_all_other_runners(zoo: Zoo, ctx: Context) -> None:
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        if task.get_name().startswith(("holdfast-runner", "holdfast-deadlines")):
            task.cancel()


async def cancel_all() -> None:
    """But for those of the judge."""
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        if task.get_name().startswith("holdfast-"):
            task.cancel()


@case(ends=DONE)
async def cancels_all_tasks_of_the_worker(zoo: Zoo, ctx: Context) -> None:
    await cancel_all()


@case(says="CancelledError")
async def cancels_all_tasks_by_a_task_that_it_started(zoo: Zoo, ctx: Context) -> None:
    await asyncio.create_task(cancel_all())


@case(says="CancelledError")
async def waits_for_what_is_cancelled(zoo: Zoo, ctx: Context) -> None:
    other = asyncio.ensure_future(asyncio.sleep(100))
    other.cancel()
    await other


@case(ends=Reason.TIMEOUT_EXCEEDED, hasty=True)
async def hangs(zoo: Zoo, ctx: Context) -> None:
    await asyncio.Event().wait()


@case(ends=Reason.TIMEOUT_EXCEEDED, hasty=True)
async def swallows_its_deadline_and_returns(zoo: Zoo, ctx: Context) -> None:
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()


@case(ends=Reason.TIMEOUT_EXCEEDED, hasty=True)
async def answers_its_deadline_with_another_error(zoo: Zoo, ctx: Context) -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        raise ValueError("and so on") from None


async def hang_on() -> None:
    """Whatever comes, and also when the worker and its loop have ended."""
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)


@case(ends=Reason.TIMEOUT_EXCEEDED, says="hang_on", hasty=True)
async def swallows_every_cancellation(zoo: Zoo, ctx: Context) -> None:
    await hang_on()


@case(ends=Reason.TIMEOUT_EXCEEDED, says="hang_on", hasty=True)
async def swallows_every_cancellation_in_its_transaction(zoo: Zoo, ctx: Context) -> None:
    async with ctx.transaction():
        await hang_on()


@case(ends=DONE, hasty=True)
async def swallows_every_cancellation_after_its_transaction(zoo: Zoo, ctx: Context) -> None:
    async with ctx.transaction():
        pass
    await hang_on()


@case(ends=Reason.TIMEOUT_EXCEEDED, hasty=True)
async def works_on_after_it_was_given_up(zoo: Zoo, ctx: Context) -> None:
    started = zoo.loop.time()
    while zoo.loop.time() < started + 0.8:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.02)
    for verb in (
        lambda: ctx.enqueue(JobDraft("Good", b"{}")),
        lambda: ctx.release(1),
        lambda: ctx.fence,
    ):
        with pytest.raises(RunEnded):
            verb()
    with pytest.raises(RunEnded):
        await ctx.step(Stage.USER, nothing)
    with pytest.raises(RunEnded):
        async with ctx.transaction():
            pass


# Leaks and re-entrance.


@case(ends=DONE)
async def leaks_a_task_that_uses_its_context(zoo: Zoo, ctx: Context) -> None:
    ended = asyncio.Event()

    async def enqueue() -> None:
        await ended.wait()
        ctx.enqueue(JobDraft("Good", b"{}"))

    async def transact() -> None:
        await ended.wait()
        async with ctx.transaction():
            pass

    zoo.leaked += [asyncio.create_task(enqueue()), asyncio.create_task(transact())]
    zoo.loop.call_later(0.05, ended.set)


@case(says="while its transaction was open")
async def leaks_its_open_transaction(zoo: Zoo, ctx: Context) -> None:
    inside = asyncio.Event()

    async def transact() -> None:
        async with ctx.transaction():
            inside.set()
            await asyncio.sleep(0.2)

    zoo.leaked.append(asyncio.create_task(transact()))
    await inside.wait()


@case(says="within itself")
async def enters_its_transaction_twice(zoo: Zoo, ctx: Context) -> None:
    async with ctx.transaction(), ctx.transaction():
        pass


@case(says="within itself")
async def enters_its_transaction_in_two_tasks(zoo: Zoo, ctx: Context) -> None:
    async def transact() -> None:
        async with ctx.transaction():
            await asyncio.sleep(0.01)

    await asyncio.gather(transact(), transact())


@case(ends=DONE)
async def goes_on_after_its_transaction(zoo: Zoo, ctx: Context) -> None:
    async with ctx.transaction():
        pass
    await ctx.step(Stage.USER, nothing)


@case(ends=DONE)
async def enqueues_after_its_transaction(zoo: Zoo, ctx: Context) -> None:
    async with ctx.transaction():
        pass
    ctx.enqueue(JobDraft("Good", b"{}"))


@case(says="not with ctx.enqueue")
async def enqueues_before_its_transaction(zoo: Zoo, ctx: Context) -> None:
    ctx.enqueue(JobDraft("Good", b"{}"))
    async with ctx.transaction():
        pass


async def execute(connection: Any, statements: str) -> None:
    """On a connection of either engine."""
    answer = connection.execute(statements)
    if hasattr(answer, "__await__"):
        await answer


@case(of=["ROLLBACK", "COMMIT", "ROLLBACK; BEGIN", "COMMIT; BEGIN"], says="TransactionEnded")
async def ends_its_own_transaction(zoo: Zoo, ctx: Context, value: str) -> None:
    async with ctx.transaction() as connection:
        await execute(connection, value)


@case(ends=DONE)
async def uses_savepoints_in_its_transaction(zoo: Zoo, ctx: Context) -> None:
    async with ctx.transaction() as connection:
        for statement in (
            "SAVEPOINT one",
            "SAVEPOINT two",
            "ROLLBACK TO two",
            "RELEASE one",
            "SAVEPOINT left_open",
        ):
            await execute(connection, statement)


async def close(connection: Any) -> None:
    closed = connection.close()
    if closed is not None:
        await closed


@case(says="TransactionEnded")
async def closes_the_connection_of_its_transaction(zoo: Zoo, ctx: Context) -> None:
    async with ctx.transaction() as connection:
        await close(connection)


@case(says="TransactionEnded")
async def terminates_the_connection_of_its_transaction(zoo: Zoo, ctx: Context) -> None:
    async with ctx.transaction() as connection:
        connection.terminate() if zoo.o.store.shared else connection.close()


@case()
async def uses_the_connection_that_it_closed(zoo: Zoo, ctx: Context) -> None:
    async with ctx.transaction() as connection:
        await close(connection)
        await execute(connection, "SELECT 1")


@case(says="of its own")
async def raises_after_it_closed_the_connection(zoo: Zoo, ctx: Context) -> None:
    async with ctx.transaction() as connection:
        await close(connection)
        raise ValueError("of its own")


@case(says="UniqueViolationError")
async def leaves_what_a_deferred_constraint_refuses(zoo: Zoo, ctx: Context) -> None:
    async with ctx.transaction() as connection:
        if not zoo.o.store.shared:
            raise ValueError(
                "SQLite has none but foreign keys, which are off: no UniqueViolationError"
            )
        await execute(
            connection, "CREATE TEMP TABLE twice (id integer UNIQUE DEFERRABLE INITIALLY DEFERRED)"
        )
        await execute(connection, "INSERT INTO twice VALUES (1), (1)")


@case()
async def swallows_the_failure_of_a_statement(zoo: Zoo, ctx: Context) -> None:
    async with ctx.transaction() as connection:
        with suppress(Exception):
            await execute(connection, "SELECT no_such_column")
        if not zoo.o.store.shared:
            raise ValueError("SQLite goes on after it")


@case(ends=DONE)
async def leaves_a_row_trace_on_the_connection(zoo: Zoo, ctx: Context) -> None:
    async with ctx.transaction() as connection:
        if not zoo.o.store.shared:
            connection.row_trace = lambda cursor, row: {"row": row}
            connection.exec_trace = lambda cursor, sql, bindings: True


@case(says="RunEnded")
async def uses_the_context_of_another_job(zoo: Zoo, ctx: Context) -> None:
    zoo.other.enqueue(JobDraft("Good", b"{}"))


@case(says="RunEnded")
async def finishes_another_job(zoo: Zoo, ctx: Context) -> None:
    async with zoo.other.transaction():
        pass


# Time, threads and sizes.


@case(ends=DONE)
async def blocks_the_loop(zoo: Zoo, ctx: Context) -> None:
    time.sleep(0.3)  # noqa: ASYNC251 - that is the misbehaviour


@case(ends=DONE)
async def leaks_threads(zoo: Zoo, ctx: Context) -> None:
    for _ in range(50):
        threading.Thread(target=zoo.release.wait, daemon=True).start()


@case(ends=DONE)
async def fills_the_executor(zoo: Zoo, ctx: Context) -> None:
    for _ in range(64):
        asyncio.get_running_loop().run_in_executor(None, zoo.release.wait)


@case(ends=DONE)
async def returns_fifty_megabytes(zoo: Zoo, ctx: Context) -> bytes:
    return bytes(50 << 20)


@case(ends=DONE)
async def enqueues_as_much_as_it_may(zoo: Zoo, ctx: Context) -> None:
    filler = b'{"number":1,"filler":"' + b"x" * ((1 << 20) - 100) + b'"}'
    for _ in range(15):
        ctx.enqueue(JobDraft("Good", filler))


@case(ends=DONE)
async def raises_in_a_callback_of_the_loop(zoo: Zoo, ctx: Context) -> None:
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)


@case(says="TypeError")
def is_not_async(zoo: Zoo, ctx: Context) -> None:
    """Its wrapper awaits None."""


@pytest.mark.parametrize("name", list(CASES))
def test_any_misbehaviour_of_a_handler_is_an_outcome_of_its_job(
    zoo: Zoo, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    zoo.do(zoo.judge(name))
    assert "work.store_unavailable" not in caplog.text, "the store was blamed"
    assert "work.lease_lost" not in caplog.text
