"""A worker with real handlers on a real store: order, retries, steps, drain."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
from work_rigs import ManualWorker, Opened, draft, embedded_work, postgres_work, until

from engines import Server
from holdfast.errors import BadSetting, OutcomeUnknown, Unavailable
from holdfast.resilience import BreakerSettings
from holdfast.work.contract import Claimed, ClaimRequest, Report
from holdfast.work.failures import JobFailed
from holdfast.work.handlers import Context, Handlers
from holdfast.work.inspection import Query
from holdfast.work.job import FailureAction, JobDraft, OnFailure, Policies, Reason, Stage, State
from holdfast.work.outbox import enqueue
from holdfast.work.worker import Worker, WorkerSettings

QUICK = WorkerSettings(concurrency=8, balance_seconds=0.3, poll_max_seconds=0.05, drain_seconds=5)
SOON = Policies.preset("uniform").with_type("Order", base_seconds=0.02)


class Order(msgspec.Struct):
    order_id: str
    number: int = 0


async def empty(o: Opened) -> bool:
    return not await o.store.find(Query(), 1)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "postgres":
        server = request.getfixturevalue("postgres_server")
        return lambda: postgres_work(server.url)
    return lambda: embedded_work(tmp_path / "work.db" if request.param == "sqlite" else None)


async def test_streams_run_side_by_side_each_in_order(opened: Any) -> None:
    async with opened() as o:
        handlers, seen, active, most = Handlers(), defaultdict(list), set(), 0

        @handlers.handle(Order, stream=lambda order: order.order_id)
        async def handle(ctx: Context, order: Order) -> None:
            nonlocal most
            assert order.order_id not in active
            active.add(order.order_id)
            most = max(most, len(active))
            await asyncio.sleep(0.001)
            active.remove(order.order_id)
            seen[order.order_id].append(order.number)

        orders = [Order(f"o{n % 7}", n) for n in range(300)]
        await o.store.enqueue([handlers.draft(order) for order in orders[:150]])
        async with Worker(o.store, handlers, settings=QUICK).running():
            await o.store.enqueue([handlers.draft(order) for order in orders[150:]])
            await until(lambda: sum(map(len, seen.values())) == 300)
            await until(lambda: empty(o))
        assert all(numbers == sorted(numbers) for numbers in seen.values())
        assert most > 1


async def test_failed_head_holds_its_stream_until_its_retry_succeeds(opened: Any) -> None:
    async with opened() as o:
        handlers, runs = Handlers(), list[tuple[int, int]]()

        @handlers.handle(Order, stream=lambda order: order.order_id)
        async def handle(ctx: Context, order: Order) -> None:
            runs.append((order.number, ctx.job.attempt))
            if order.number == 0 and ctx.job.attempt < 3:
                raise RuntimeError("not yet")

        await o.store.enqueue([handlers.draft(Order("a", n)) for n in range(20)])
        async with Worker(o.store, handlers, settings=QUICK, policies=SOON).running():
            await until(lambda: empty(o))
        assert runs == [(0, 1), (0, 2), (0, 3), *((n, 1) for n in range(1, 20))]


async def test_release_by_an_operator_lets_followers_run_before_the_head(opened: Any) -> None:
    async with opened() as o:
        handlers, done = Handlers(), list[int]()

        @handlers.handle(Order, stream=lambda order: order.order_id)
        async def handle(ctx: Context, order: Order) -> None:
            if order.number == 0:
                raise RuntimeError("never")
            done.append(order.number)

        seqs = await o.store.enqueue([handlers.draft(Order("a", n)) for n in range(4)])
        async with Worker(o.store, handlers, settings=QUICK).running():
            await until(lambda: _blocked(o))
            await until(lambda: _held(o, 3))
            await o.store.release("a", ids=seqs[1:3], by="ann", why="independent")
            await until(lambda: len(done) == 2)
            await o.store.bury([seqs[0]], by="ann", why="hopeless")
            await until(lambda: len(done) == 3)
        assert done == [1, 2, 3]


async def test_failing_handler_can_release_named_followers(opened: Any) -> None:
    async with opened() as o:
        handlers, seqs, done = Handlers(), list[int](), list[int]()

        @handlers.handle(Order, stream=lambda order: order.order_id)
        async def handle(ctx: Context, order: Order) -> None:
            if order.number == 0:
                ctx.release(*seqs[1:3])
                raise RuntimeError("never")
            done.append(order.number)

        seqs += await o.store.enqueue([handlers.draft(Order("a", n)) for n in range(4)])
        async with Worker(o.store, handlers, settings=QUICK).running():
            await until(lambda: len(done) == 2)
            await until(lambda: _held(o, 1))
        assert done == [1, 2]
        (blocked,) = await o.store.streams()
        assert blocked.block.released_ids == set(seqs[1:3])


async def _blocked(o: Opened) -> bool:
    return bool(await o.store.streams())


async def _held(o: Opened, count: int) -> bool:
    return len(await o.store.find(Query(state=State.HELD))) == count


async def test_job_parked_and_reset_while_it_runs_does_not_stop_its_stream(
    opened: Any,
) -> None:
    async with opened() as o:
        handlers, done, second, repaired = Handlers(), list[int](), asyncio.Event(), asyncio.Event()

        @handlers.handle(Order, stream=lambda order: order.order_id)
        async def handle(ctx: Context, order: Order) -> None:
            if order.number == 0 and not repaired.is_set():
                if ctx.job.attempt == 2:
                    second.set()
                    await repaired.wait()
                raise RuntimeError("not yet")
            done.append(order.number)

        seqs = await o.store.enqueue([handlers.draft(Order("a", n)) for n in range(3)])
        async with Worker(o.store, handlers, settings=QUICK, policies=SOON).running():
            await second.wait()
            await o.store.park(seqs[:1], by="ann", why="stop it")
            await o.store.retry(seqs[:1], reset=True, by="ann", why="it is repaired")
            await until(lambda: _ready_again(o, seqs[0]))
            repaired.set()
            await until(lambda: empty(o))
        assert done == [0, 1, 2]


async def _ready_again(o: Opened, seq: int) -> bool:
    (entry,) = await o.store.find(Query(seqs=[seq]))
    return entry.state is State.READY


@pytest.mark.covers("003 progression Stored, EventStored, Published")
async def test_completed_step_is_not_repeated(opened: Any) -> None:
    async with opened() as o:
        handlers, steps = Handlers(), list[str]()

        @handlers.handle(Order)
        async def handle(ctx: Context, order: Order) -> None:
            async def store() -> None:
                steps.append("store")

            async def publish() -> None:
                steps.append("publish")
                (entry,) = await o.store.find(Query())
                assert entry.stages & Stage.EVENT_STORED, "durable before the next step begins"
                if ctx.job.attempt == 1:
                    raise ConnectionError("the broker is unavailable")

            await ctx.step(Stage.EVENT_STORED, store)
            await ctx.step(Stage.PUBLISHED, publish)

        await o.store.enqueue([handlers.draft(Order("a"))])
        async with Worker(o.store, handlers, settings=QUICK, policies=SOON).running():
            await until(lambda: empty(o))
        assert steps == ["store", "publish", "publish"]


async def test_failure_of_the_job_store_costs_a_second_no_strike_and_no_breaker(
    postgres_server: Server,
) -> None:
    async with postgres_work(postgres_server.url) as o:
        handlers, done = Handlers(), list[int]()

        @handlers.handle(Order)
        async def handle(ctx: Context, order: Order) -> None:
            try:
                async with ctx.transaction() as transaction:
                    if order.order_id == "own":
                        await transaction.execute("SELECT 1 / 0")
                    if ctx.job.attempt == 1:
                        kill = "SELECT pg_terminate_backend($1)"
                        await asyncpg_execute(
                            postgres_server.url, kill, transaction.get_server_pid()
                        )
                        if order.order_id == "used":
                            await transaction.execute("SELECT 1")
            except OutcomeUnknown as error:
                if order.order_id == "wrapped":
                    raise RuntimeError("as many do") from error
                if order.order_id == "grouped":
                    raise ExceptionGroup("as a TaskGroup does", [error]) from None
                raise
            done.append(ctx.job.strikes)

        orders = ["left", "used", "wrapped", "grouped", "own"]
        seqs = await o.store.enqueue([handlers.draft(Order(order)) for order in orders])
        settings = replace(
            QUICK, breaker=BreakerSettings(failure_threshold=1, open_duration_seconds=60)
        )
        async with Worker(o.store, handlers, settings=settings).running():
            await until(lambda: _waiting_for_retry(o, 5))
            entries = {entry.seq: entry for entry in await o.store.find(Query())}
            for seq in seqs[:4]:
                entry = entries[seq]
                assert (entry.reason, entry.strikes) == (Reason.DEPENDENCY_FAILURE, 0), entry.error
                assert entry.due_at is not None and entry.due_at - time.time() < 1.2
            assert (
                entries[seqs[4]].error_type == "DivisionByZeroError"
                and entries[seqs[4]].strikes == 1
            )
            await until(lambda: len(done) == 4)
            assert await o.store.open_breakers() == []
        assert done == [0, 0, 0, 0]


@pytest.mark.parametrize("inside", [False, True], ids=["handler", "transaction"])
async def test_handler_that_swallows_every_cancellation_does_not_delay_the_stop(
    opened: Any, inside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """That the loop ends, too, is the test's own end."""

    async with opened() as o:
        handlers, running = Handlers(), asyncio.Event()

        @handlers.handle(Order)
        async def handle(ctx: Context, order: Order) -> None:
            async with ctx.transaction() if inside else nullcontext():
                running.set()
                while True:
                    with suppress(asyncio.CancelledError):
                        await asyncio.sleep(0.02)

        (seq,) = await o.store.enqueue([handlers.draft(Order("a"))])
        worker = Worker(
            o.store, handlers, settings=replace(QUICK, drain_seconds=0.3, cancel_seconds=0.2)
        )
        task = asyncio.create_task(worker.run())
        await running.wait()
        worker.stop()
        await asyncio.wait_for(task, 10)
        manual = await ManualWorker.join(o.store)
        assert await manual.turn() == [seq], "it was given back"
        assert (manual.jobs[seq].attempt, manual.jobs[seq].crashes) == (1, 0)
        assert (
            "work.handler_stuck" in caplog.text
            and "given back" in caplog.text
            and "in handle" in caplog.text
        )


async def test_stuck_handler_beyond_the_bound_costs_a_runner_until_it_ends(
    opened: Any,
) -> None:
    async with opened() as o:
        handlers, release, done = Handlers(), asyncio.Event(), list[int]()

        @handlers.handle(Order, deadline_seconds=0.1)
        async def handle(ctx: Context, order: Order) -> None:
            while order.order_id == "stuck" and not release.is_set():
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.02)
            done.append(order.number)

        settings = replace(QUICK, concurrency=2, cancel_seconds=0.1, stuck_max=1)
        seqs = await o.store.enqueue([handlers.draft(Order("stuck", n)) for n in range(3)])
        async with Worker(o.store, handlers, settings=settings).running():
            await until(lambda: _waiting_for_retry(o, 3))
            await o.store.enqueue([handlers.draft(Order("good", 7))])
            entries = await o.store.find(Query(seqs=seqs))
            assert {entry.reason for entry in entries} == {Reason.TIMEOUT_EXCEEDED}
            assert not done
            release.set()
            await until(lambda: 7 in done)


async def test_refused_report_is_isolated_and_the_others_are_stored(
    opened: Any,
) -> None:
    async with opened() as o:
        handlers, ready, later = Handlers(), asyncio.Barrier(8), list[str]()

        @handlers.handle(Order, stream=lambda order: order.order_id)
        async def handle(ctx: Context, order: Order) -> None:
            if order.number == 8:
                later.append(order.order_id)
                return
            if order.number in (3, 5):
                child = draft(None, "Nobody", b"{}")
                object.__setattr__(child, "payload", "no bytes")
                ctx.enqueue(child)
            await ready.wait()

        seqs = await o.store.enqueue([handlers.draft(Order(f"o{n}", n)) for n in range(8)])
        async with Worker(o.store, handlers, settings=QUICK).running():
            await until(lambda: _waiting_for_retry(o, 2))
            await until(lambda: _left(o, 2))
            await o.store.enqueue([handlers.draft(Order(name, 8)) for name in ("o3", "o4")])
            await until(lambda: "o4" in later)
            assert later == ["o4"], "the stream of a job that failed waits for it"
        entries = await o.store.find(Query(seqs=seqs))
        assert {entry.seq for entry in entries} == {seqs[3], seqs[5]}
        for entry in entries:
            assert (entry.reason, entry.strikes, entry.error_type) == (
                Reason.HANDLER_EXCEPTION,
                1,
                "ReportRefused",
            )


async def test_handlers_that_hold_all_transactions_can_still_step_and_enqueue(
    postgres_server: Server,
) -> None:
    async with postgres_work(postgres_server.url) as o:
        handlers, inside, all_inside = Handlers(), 0, asyncio.Event()

        async def nothing() -> None:
            """The step's own action."""

        @handlers.handle(Order)
        async def handle(ctx: Context, order: Order) -> None:
            nonlocal inside
            async with ctx.transaction():
                inside += 1
                if inside == 8:
                    all_inside.set()
                await all_inside.wait()
                await ctx.step(Stage.USER, nothing)
                await o.store.find(Query(), 1)

        await o.store.enqueue([handlers.draft(Order("a", n)) for n in range(8)])
        async with Worker(o.store, handlers, settings=QUICK).running():
            await until(lambda: empty(o))


async def asyncpg_execute(url: str, statement: str, *values: Any) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(statement, *values)
    await connection.close()


async def _waiting_for_retry(o: Opened, count: int) -> bool:
    return len(await o.store.find(Query(state=State.RETRY))) == count


@pytest.mark.covers("003 inbox: handler effects once")
async def test_effects_in_the_transaction_of_a_handler_happen_exactly_once(
    postgres_server: Server,
) -> None:
    async with postgres_work(postgres_server.url) as o:
        connection = await asyncpg.connect(postgres_server.url)
        await connection.execute("DROP TABLE IF EXISTS effects; CREATE TABLE effects (n int)")
        handlers = Handlers()

        @handlers.handle(Order)
        async def handle(ctx: Context, order: Order) -> None:
            async with ctx.transaction() as transaction:
                await transaction.execute("INSERT INTO effects VALUES ($1)", order.number)
                if ctx.job.attempt == 1 and order.number % 3 == 0:
                    raise RuntimeError("rolls back")

        await o.store.enqueue([handlers.draft(Order("a", n)) for n in range(30)])
        async with Worker(o.store, handlers, settings=QUICK, policies=SOON).running():
            await until(lambda: empty(o))
        rows = await connection.fetch("SELECT n FROM effects ORDER BY n")
        assert [row["n"] for row in rows] == list(range(30))
        await connection.close()


async def test_handler_that_swallows_its_deadline_times_out_without_harming_later_jobs(
    opened: Any,
) -> None:
    async with opened() as o:
        handlers, done = Handlers(), list[int]()

        @handlers.handle(Order, deadline_seconds=0.2)
        async def handle(ctx: Context, order: Order) -> None:
            if order.number == 0:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    return
            await asyncio.sleep(0)
            done.append(order.number)

        settings = WorkerSettings(
            concurrency=1, jobs_max=8, balance_seconds=0.3, poll_max_seconds=0.05
        )
        seqs = await o.store.enqueue([handlers.draft(Order("a", n)) for n in range(4)])
        async with Worker(o.store, handlers, settings=settings).running():
            await until(lambda: len(done) == 3)
            await until(lambda: _waiting_for_retry(o, 1))
        (entry,) = await o.store.find(Query())
        assert (entry.seq, entry.reason) == (seqs[0], Reason.TIMEOUT_EXCEEDED)


@pytest.mark.covers("003 TimeoutExceeded = 4")
async def test_run_beyond_its_deadline_is_cancelled_and_fails_as_a_timeout(opened: Any) -> None:
    async with opened() as o:
        handlers = Handlers()

        @handlers.handle(Order, deadline_seconds=0.2)
        async def handle(ctx: Context, order: Order) -> None:
            if order.number:
                await asyncio.Event().wait()

        await o.store.enqueue([handlers.draft(Order("a", 1)), handlers.draft(Order("a", 0))])
        async with Worker(o.store, handlers, settings=QUICK).running():
            await until(lambda: _failed(o))
        (entry,) = await o.store.find(Query())
        assert (entry.reason, entry.state) == (Reason.TIMEOUT_EXCEEDED, State.RETRY)


async def _failed(o: Opened) -> bool:
    return bool(await o.store.find(Query(state=State.RETRY)))


async def test_unknown_types_and_undecodable_payloads_are_recorded_failures(opened: Any) -> None:
    async with opened() as o:
        handlers = Handlers()

        @handlers.handle(Order)
        async def handle(ctx: Context, order: Order) -> None:
            raise AssertionError("never called")

        await o.store.enqueue([draft(None, "Order", b"{not json"), draft(None, "Nobody", b"{}")])
        async with Worker(o.store, handlers, settings=QUICK).running():
            await until(lambda: _failed(o))
            await until(lambda: _dead(o))
        (unknown,) = await o.store.find(Query())
        assert unknown.reason is Reason.UNKNOWN
        assert "no handler for the job type 'Nobody'" in unknown.error
        (dead,) = await o.store.dead(Query())
        assert dead.reason is Reason.SERIALIZATION_ERROR


async def _dead(o: Opened) -> bool:
    return bool(await o.store.dead(Query()))


@pytest.mark.covers("003 3: circuit breaker per type")
async def test_open_breaker_postpones_its_type_and_harms_no_stream(opened: Any) -> None:
    async with opened() as o:
        handlers, calls, unavailable = Handlers(), list[str](), True

        @handlers.handle(Order, stream=lambda order: order.order_id)
        async def handle(ctx: Context, order: Order) -> None:
            calls.append(order.order_id)
            if unavailable:
                raise Unavailable("the carrier is unavailable")

        settings = WorkerSettings(
            concurrency=4,
            balance_seconds=0.1,
            poll_max_seconds=0.05,
            breaker=BreakerSettings(failure_threshold=3, open_duration_seconds=0.5),
        )
        await o.store.enqueue([handlers.draft(Order(f"o{n}")) for n in range(30)])
        policies = Policies().with_type("Order", base_seconds=0.05, cap_seconds=0.2)
        async with Worker(o.store, handlers, settings=settings, policies=policies).running():
            await until(lambda: _breaker_open(o))
            assert len(calls) < 30, "an open type is not tried"
            unavailable = False
            await until(lambda: empty(o))
            await until(lambda: _no_breaker(o))
        assert set(calls) == {f"o{n}" for n in range(30)}
        assert await o.store.dead(Query()) == []


async def test_jobs_of_an_open_type_are_not_claimed_except_its_probes(opened: Any) -> None:
    async with opened() as o:
        handlers, runs, put_off, join = Handlers(), 0, list[int](), o.store.join

        @handlers.handle(Order, stream=lambda order: order.order_id)
        async def handle(ctx: Context, order: Order) -> None:
            nonlocal runs
            runs += 1
            raise ConnectionError("the carrier is unavailable")

        async def watched(name: str) -> Any:
            session = await join(name)
            plain = session.process

            async def process(report: Report, request: ClaimRequest) -> Claimed:
                put_off.extend(
                    f.seq for f in report.failed if f.verdict.action is FailureAction.POSTPONE
                )
                return await plain(report, request)

            session.process = process  # type: ignore[method-assign]
            return session

        o.store.join = watched  # type: ignore[method-assign]
        settings = WorkerSettings(
            concurrency=1,
            balance_seconds=0.1,
            poll_max_seconds=0.05,
            breaker=BreakerSettings(failure_threshold=3, open_duration_seconds=0.2),
        )
        await o.store.enqueue([handlers.draft(Order(f"o{n}")) for n in range(40)])
        soon = Policies().with_type("Order", base_seconds=0.01, cap_seconds=0.05)
        async with Worker(o.store, handlers, settings=settings, policies=soon).running():
            await until(lambda: runs >= 3 + 5)
        assert len(put_off) < 40 + 10, "once each, not once more whenever a probe is due"


async def _breaker_open(o: Opened) -> bool:
    return bool(await o.store.open_breakers())


async def _no_breaker(o: Opened) -> bool:
    return not await o.store.open_breakers()


async def test_children_are_enqueued_with_the_success_of_their_parent(opened: Any) -> None:
    async with opened() as o:
        handlers, mails = Handlers(), list[int]()

        class Mail(msgspec.Struct):
            number: int

        @handlers.handle(Mail)
        async def mail(ctx: Context, message: Mail) -> None:
            mails.append(message.number)

        @handlers.handle(Order)
        async def handle(ctx: Context, order: Order) -> None:
            ctx.enqueue(handlers.draft(Mail(order.number)))
            if ctx.job.attempt == 1:
                raise JobFailed(Reason.THROTTLED, "later", retry_after_seconds=0.05)

        await o.store.enqueue([handlers.draft(Order("a", n)) for n in range(10)])
        policies = SOON.with_type("Order", base_seconds=0.01)
        async with Worker(o.store, handlers, settings=QUICK, policies=policies).running():
            await until(lambda: empty(o))
        assert sorted(mails) == list(range(10))


async def test_parent_retries_with_a_growing_delay_while_its_childs_lane_is_locked(
    postgres_server: Server,
) -> None:
    async with postgres_work(postgres_server.url) as o:
        handlers, calls, refused = Handlers(), 0, list[tuple[float, int]]()
        clock = asyncio.get_running_loop().time

        @handlers.handle(Order, stream=lambda order: order.order_id)
        async def handle(ctx: Context, order: Order) -> None:
            if order.order_id == "parent":
                ctx.enqueue(handlers.draft(Order("child")))

        join = o.store.join

        async def overheard(name: str) -> Any:
            session = await join(name)
            process = session.process

            async def listen(report: Report, request: ClaimRequest) -> Claimed:
                nonlocal calls
                calls += 1
                claimed = await process(report, request)
                if claimed.busy:
                    refused.append((clock(), calls))
                return claimed

            session.process = listen
            return session

        o.store.join = overheard
        caller = await asyncpg.connect(postgres_server.url)
        async with Worker(o.store, handlers, settings=QUICK).running():
            transaction = caller.transaction()
            await transaction.start()
            await enqueue(caller, handlers.draft(Order("child")))
            await o.store.enqueue([handlers.draft(Order("parent"))])
            await until(lambda: len(refused) == 5)
            await transaction.commit()
            await until(lambda: empty(o))
        await caller.close()
        waits = [later[0] - sooner[0] for sooner, later in itertools.pairwise(refused)]
        assert all(
            wait >= least for wait, least in zip(waits, (0.02, 0.04, 0.05, 0.05), strict=True)
        )
        assert refused[-1][1] - refused[0][1] < 30, "meanwhile the store was left in peace"


async def test_job_without_handler_goes_to_its_transport_in_order_and_is_retried(
    opened: Any,
) -> None:
    async with opened() as o:
        handlers, sent = Handlers(), list[tuple[str, bytes, int]]()

        class Topic:
            async def send(self, ctx: Context, address: str) -> None:
                if ctx.job.attempt == 1 and ctx.job.payload == b"1":
                    raise ConnectionError("the broker is unavailable")
                sent.append((address, ctx.job.payload, ctx.key))

        handlers.carry("topic", Topic())
        drafts = [
            JobDraft("OrderPlaced", str(n).encode(), "o1", "topic:orders:eu") for n in range(3)
        ]
        seqs = await o.store.enqueue([*drafts, JobDraft("OrderPlaced", b"", None, "fax:17")])
        policies = Policies.preset("uniform").with_type("OrderPlaced", base_seconds=0.02)
        async with Worker(o.store, handlers, settings=QUICK, policies=policies).running():
            await until(lambda: len(sent) == 3)
            await until(lambda: _was_tried(o, seqs[3]))
        assert sent == [("orders:eu", str(n).encode(), seqs[n]) for n in range(3)]
        (left,) = await o.store.find(Query())
        assert left.reason is Reason.UNKNOWN and "no transport for 'fax:17'" in left.error
        with pytest.raises(BadSetting):
            handlers.carry("topic", Topic())


async def _was_tried(o: Opened, seq: int) -> bool:
    return any(job.attempt for job in await o.store.find(Query(seqs=[seq])))


async def test_child_with_a_source_is_refused(opened: Any) -> None:
    async with opened() as o:
        handlers = Handlers()

        @handlers.handle(Order)
        async def handle(ctx: Context, order: Order) -> None:
            ctx.enqueue(handlers.draft(Order("b"), source="shop", source_id="1"))

        await o.store.enqueue([handlers.draft(Order("a"))])
        async with Worker(o.store, handlers, settings=QUICK).running():
            await until(lambda: _failed(o))
        (failed,) = await o.store.find(Query())
        assert failed.reason is Reason.HANDLER_EXCEPTION and "holdfast.work.outbox" in failed.error


async def test_stopping_worker_drains_running_jobs_and_gives_back_the_rest(opened: Any) -> None:
    async with opened() as o:
        handlers, started, finished, go = Handlers(), asyncio.Event(), list[int](), asyncio.Event()

        @handlers.handle(Order, stream=lambda order: order.order_id)
        async def handle(ctx: Context, order: Order) -> None:
            started.set()
            await go.wait()
            finished.append(order.number)

        await o.store.enqueue([handlers.draft(Order("a", n)) for n in range(5)])
        worker = Worker(o.store, handlers, settings=QUICK)
        task = asyncio.create_task(worker.run())
        await started.wait()
        worker.stop()
        go.set()
        await task
        assert finished == [0]
        left = await o.store.find(Query())
        assert [entry.crashes for entry in left] == [0] * 4


async def test_defect_ends_the_session_and_not_the_worker(opened: Any) -> None:
    async with opened() as o:
        handlers, done = Handlers(), list[int]()

        @handlers.handle(Order)
        async def handle(ctx: Context, order: Order) -> None:
            done.append(order.number)

        join, sessions = o.store.join, list[Any]()

        async def broken_once(name: str) -> Any:
            session = await join(name)
            sessions.append(session)
            if len(sessions) == 1:

                async def process(*_: Any) -> Any:
                    raise ZeroDivisionError

                session.process = process
            return session

        o.store.join = broken_once
        await o.store.enqueue([handlers.draft(Order("a", 1))])
        async with Worker(o.store, handlers, settings=QUICK).running():
            await until(lambda: done == [1])
        assert len(sessions) == 2


@pytest.mark.parametrize("ends", ["transaction", "step"])
async def test_job_buried_while_it_runs_ends_no_other_run(opened: Any, ends: str) -> None:
    async with opened() as o:
        handlers, go, starts, after = Handlers(), asyncio.Event(), list[int](), list[int]()

        @handlers.handle(Order, stream=lambda order: order.order_id)
        async def handle(ctx: Context, order: Order) -> None:
            starts.append(order.number)
            await go.wait()
            if order.order_id == "buried" and order.number == 0:
                if ends == "step":
                    await ctx.step(Stage.USER, lambda: asyncio.sleep(0))
                async with ctx.transaction():
                    pass
            after.append(order.number)

        buried, *_ = await o.store.enqueue(
            [
                handlers.draft(Order("buried", 0)),
                *(handlers.draft(Order(f"s{n}", n)) for n in range(1, 6)),
            ]
        )
        async with Worker(o.store, handlers, settings=QUICK).running():
            await until(lambda: len(starts) == 6)
            await o.store.bury([buried], by="ops", why="not this one")
            await o.store.enqueue([handlers.draft(Order("buried", 6))])
            go.set()
            await until(lambda: empty(o))
        assert sorted(starts) == [0, 1, 2, 3, 4, 5, 6], (
            "no other run was ended, the stream continues"
        )
        assert sorted(after) == [1, 2, 3, 4, 5, 6]


async def test_context_of_an_ended_job_refuses_everything(
    opened: Any,
) -> None:
    async with opened() as o:
        handlers, go, starts, refused = Handlers(), asyncio.Event(), list[int](), list[str]()

        async def in_vain(ctx: Context, way: str) -> None:
            if way == "step":
                await ctx.step(Stage.USER, lambda: asyncio.sleep(0))
            elif way == "error":
                raise BadSetting("too late")
            async with ctx.transaction():
                pass

        @handlers.handle(Order)
        async def handle(ctx: Context, order: Order) -> None:
            starts.append(order.number)
            if order.order_id == "good":
                await go.wait()
                return
            async with ctx.transaction():
                if order.order_id == "nested" and ctx.job.attempt == 1:
                    await in_vain(ctx, "nested")
            if order.order_id != "nested":
                try:
                    await in_vain(ctx, order.order_id)
                except BadSetting:
                    refused.append(order.order_id)
                    raise

        ways = ("good", "twice", "step", "error", "nested")
        await o.store.enqueue([handlers.draft(Order(way, n)) for n, way in enumerate(ways)])
        async with Worker(o.store, handlers, settings=QUICK, policies=SOON).running():
            await until(lambda: _left(o, 1))
            go.set()
            await until(lambda: empty(o))
        assert sorted(starts) == [0, 1, 2, 3, 4, 4], (
            "each once, but for the one that was rolled back"
        )
        assert sorted(refused) == ["error", "step", "twice"]


class Untellable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


async def test_failure_that_cannot_be_judged_affects_only_its_job(opened: Any) -> None:
    async with opened() as o:
        handlers, go, starts = Handlers(), asyncio.Event(), list[int]()

        @handlers.handle(Order)
        async def handle(ctx: Context, order: Order) -> None:
            match order.order_id:
                case "good":
                    starts.append(order.number)
                    await go.wait()
                case "untellable":
                    raise Untellable
                case "cancelled":
                    other = asyncio.ensure_future(asyncio.sleep(100))
                    other.cancel()
                    await other
                case seconds:
                    raise JobFailed(Reason.THROTTLED, retry_after_seconds=float(seconds))

        def hook(error: BaseException) -> Reason:
            return {"known": Reason.UNKNOWN}[error.args[0]]

        orders = ("good", "untellable", "cancelled", "inf", "nan", "1e300", "good")
        await o.store.enqueue([handlers.draft(Order(order, n)) for n, order in enumerate(orders)])
        async with Worker(o.store, handlers, settings=QUICK, hook=hook).running():
            await until(lambda: _waiting_for_retry(o, 5))
            go.set()
            await until(lambda: _left(o, 5))
        assert sorted(starts) == [0, 6], "no other run was ended"
        entries = await o.store.find(Query())
        assert all(entry.attempt == 1 and entry.due_at is not None for entry in entries)
        assert {entry.reason for entry in entries} == {Reason.HANDLER_EXCEPTION, Reason.THROTTLED}


async def _left(o: Opened, count: int) -> bool:
    return len(await o.store.find(Query())) == count


async def test_deep_stream_and_parked_stream_do_not_stop_the_others(opened: Any) -> None:
    async with opened() as o:
        handlers, done = Handlers(), defaultdict(list)

        @handlers.handle(Order, stream=lambda order: order.order_id)
        async def handle(ctx: Context, order: Order) -> None:
            if order.order_id == "parked":
                raise RuntimeError("never")
            done[order.order_id].append(order.number)

        settings = WorkerSettings(
            concurrency=4, jobs_max=32, per_stream_max=8, balance_seconds=0.3, poll_max_seconds=0.05
        )
        jobs = (
            [Order("parked", n) for n in range(100)]
            + [Order("deep", n) for n in range(200)]
            + [Order("b", 1)]
        )
        await o.store.enqueue([handlers.draft(order) for order in jobs])
        policies = Policies().with_type("Order", stream=OnFailure.PARK)
        async with Worker(o.store, handlers, settings=settings, policies=policies).running():
            await until(lambda: len(done["deep"]) == 200 and done["b"])
        assert done["deep"] == list(range(200))
        (blocked,) = await o.store.streams()
        assert blocked.waiting == 99


async def test_half_held_stream_of_a_worker_continues_in_order_at_a_busy_one(
    opened: Any,
) -> None:
    """The first of the stream were in the memory of the one who left, the others it had
    given back for want of room.
    """

    async with opened() as o:
        handlers, done = Handlers(), list[int]()

        @handlers.handle(Order, stream=lambda order: order.order_id)
        async def handle(ctx: Context, order: Order) -> None:
            if order.order_id == "deep":
                done.append(order.number)

        await o.store.enqueue([handlers.draft(Order(f"s{n}")) for n in range(100)])
        deep = await o.store.enqueue([handlers.draft(Order("deep", n)) for n in range(10)])
        manual = await ManualWorker.join(o.store)
        await manual.turn(200)
        await manual.turn(held=deep[6:])
        await manual.session.leave()
        settings = WorkerSettings(
            concurrency=2, jobs_max=8, balance_seconds=0.3, poll_max_seconds=0.05
        )
        async with Worker(o.store, handlers, settings=settings).running():
            await until(lambda: empty(o))
        assert done == list(range(10))


async def test_stalled_streams_delay_no_other_and_have_no_followers_in_flight(
    opened: Any,
) -> None:
    async with opened() as o:
        handlers, go, done, running = Handlers(), asyncio.Event(), 0, set[int]()

        @handlers.handle(Order, stream=lambda order: order.order_id)
        async def handle(ctx: Context, order: Order) -> None:
            nonlocal done
            if order.order_id.startswith("deep"):
                await go.wait()
            else:
                done += 1

        join = o.store.join

        async def overheard(name: str) -> Any:
            session = await join(name)
            process = session.process

            async def listen(report: Report, request: ClaimRequest) -> Claimed:
                running.update(report.running)
                return await process(report, request)

            session.process = listen
            return session

        o.store.join = overheard
        deep = [handlers.draft(Order(f"deep{n % 4}", n)) for n in range(400)]
        others = [handlers.draft(Order(f"s{n}", n)) for n in range(60)]
        seqs = await o.store.enqueue(deep + others)
        settings = WorkerSettings(concurrency=8, jobs_max=64, drain_seconds=5, balance_seconds=0.3)
        async with Worker(o.store, handlers, settings=settings).running():
            await until(lambda: done == 60)
            assert len(running & set(seqs[:400])) <= 8, (
                "no crash is laid to what no runner could get"
            )
            go.set()
            await until(lambda: empty(o))


async def test_new_job_does_not_wait_for_the_poll_while_another_runs(opened: Any) -> None:
    async with opened() as o:
        handlers, started, over, warm = (
            Handlers(),
            asyncio.Event(),
            asyncio.Event(),
            asyncio.Event(),
        )

        @handlers.handle(Order)
        async def handle(ctx: Context, order: Order) -> None:
            if order.order_id == "long":
                started.set()
                await over.wait()
            else:
                (warm if order.order_id == "warm" else over).set()

        lazy = WorkerSettings(
            concurrency=2, poll_min_seconds=50, poll_max_seconds=50, balance_seconds=50
        )
        async with Worker(o.store, handlers, settings=lazy).running():
            for _ in range(3):
                warm.clear()
                await o.store.enqueue([handlers.draft(Order("warm"))])
                await asyncio.wait_for(warm.wait(), 20)
            await o.store.enqueue([handlers.draft(Order("long"))])
            await asyncio.wait_for(started.wait(), 20)
            await o.store.enqueue([handlers.draft(Order("short"))])
            await asyncio.wait_for(over.wait(), 20)


async def test_commit_during_falling_asleep_does_not_wait_for_the_poll(
    postgres_server: Server,
) -> None:
    """Its writer asked which workers sleep before this one said that it does."""

    async with postgres_work(postgres_server.url) as o:
        handlers, found, looks = Handlers(), asyncio.Event(), 0
        join = o.store.join

        async def counted(name: str) -> Any:
            session: Any = await join(name)
            process = session.process

            async def looking(report: Report, request: ClaimRequest) -> Claimed:
                nonlocal looks
                looks += 1
                return await process(report, request)  # type: ignore[no-any-return]

            session.process = looking
            return session

        o.store.join = counted  # type: ignore[method-assign]

        @handlers.handle(Order)
        async def handle(ctx: Context, order: Order) -> None:
            found.set()

        lazy = WorkerSettings(
            concurrency=2, poll_min_seconds=50, poll_max_seconds=50, balance_seconds=50
        )
        connection = await asyncpg.connect(postgres_server.url)
        try:
            async with connection.transaction():
                await enqueue(connection, handlers.draft(Order("late")))
                worker = Worker(o.store, handlers, settings=lazy)
                running = asyncio.create_task(worker.run())
                await until(lambda: looks >= 6)
                assert not found.is_set()
            await asyncio.wait_for(found.wait(), 20)
            worker.stop()
            await running
        finally:
            await connection.close()
