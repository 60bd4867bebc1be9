"""Jobs per second beside PgQueuer, Procrastinate and (in the full run) Graphile Worker.

The same PostgreSQL, the same run, a handler awaited. Holdfast keeps the order of 500
streams, retries what fails (one job in 499 fails once) and sweeps for late commits; the
peers do what they do by default. Synchronous commit is on for all. Rates are for
draining a filled queue, with the garbage of filling it collected before; every arm, a
peer's too, begins with an empty database and a checkpoint. A ratio is the median of the
rounds' own ratios; the order within a round changes from round to round.

    python bench/work.py --quick --json
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import structlog
import uvloop

from harness import arguments, finish, median, percentile, say
from work_crashes import crash_recovery_rounds
from work_peers import PeerMissing, graphile, pgqueuer, procrastinate
from work_producers import held_transaction_ratio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from engines import Missing, postgres
from holdfast.work.contract import WorkStore
from holdfast.work.handlers import Context, Handlers
from holdfast.work.job import JobDraft, Policies
from holdfast.work.outbox import enqueue
from holdfast.work.postgres import PostgresWork
from holdfast.work.sqlite import SqliteWork
from holdfast.work.worker import Worker, WorkerSettings

STREAMS = 500
FAILS_ONE_IN = 499  # a prime, so that the failures fall into different streams
PARTS = ("peers", "blocked", "held", "producers", "latency", "crash", "sqlite")
FIGURES = {
    "holdfast": "jobs_per_s_postgres",
    "sqlite": "jobs_per_s_sqlite",
    "latency p99 ms": "latency_p99_ms",
    "rounds after a crash": "crash_recovery_rounds",
}
PEERS = {
    "pgqueuer 5x10": "jobs_vs_pgqueuer",
    "pgqueuer 5x100": "jobs_vs_pgqueuer_100",
    "procrastinate": "jobs_vs_procrastinate",
    "graphile worker": "jobs_vs_graphile",
}
COSTS = {"with 100 k blocked": "blocked_cost", "with a held transaction": "held_transaction"}
SETTINGS = WorkerSettings(concurrency=100)
SOON = Policies().with_type("Piece", base_seconds=0.01, cap_seconds=0.02)


class Piece(msgspec.Struct):
    stream: str
    number: int
    at: float = 0.0


async def drain(store: WorkStore, total: int, batch: int = 500) -> float:
    """Fill, then measure until every job was handled; jobs per second."""
    handlers, done, last = Handlers(), 0, dict[str, int]()
    finished = asyncio.Event()

    @handlers.handle(Piece, stream=lambda piece: piece.stream)
    async def handle(ctx: Context, piece: Piece) -> None:
        nonlocal done
        await asyncio.sleep(0)
        if piece.number % FAILS_ONE_IN == 0 and ctx.job.attempt == 1:
            raise RuntimeError("once")
        assert last.get(piece.stream, -1) < piece.number, "the order of a stream is broken"
        last[piece.stream] = piece.number
        done += 1
        if done == total:
            finished.set()

    drafts = [handlers.draft(Piece(f"s{n % STREAMS}", n)) for n in range(total)]
    for start in range(0, total, batch):
        await store.enqueue(drafts[start : start + batch])
    worker = Worker(store, handlers, settings=SETTINGS, policies=SOON)
    del drafts
    gc.collect()
    started = time.perf_counter()
    async with worker.running():
        await finished.wait()
    return total / (time.perf_counter() - started)


async def empty(url: str) -> None:
    """Before every arm alike: nothing is left of the others, on disk or in memory, that
    it would have to pay for.
    """
    connection = await asyncpg.connect(url)
    # in public: PgQueuer, Procrastinate
    for name in ("holdfast_work", "graphile_worker", "public"):
        await connection.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE")
    await connection.execute("CREATE SCHEMA public")
    await connection.execute("CHECKPOINT")
    await connection.close()
    gc.collect()


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[PostgresWork]:
    store = await PostgresWork.open(url)
    try:
        yield store
    finally:
        await store.close()


async def holdfast(url: str, total: int) -> float:
    async with opened(url) as store:
        return await drain(store, total)


async def with_blocked(url: str, total: int, blocked: int) -> float:
    """The rate while ``blocked`` jobs of 100 streams wait behind parked heads."""
    async with opened(url) as store:
        connection = await asyncpg.connect(url)
        await connection.execute(
            "INSERT INTO holdfast_work.job (partition, state, type, payload, stream) SELECT n %"
            " 100, CASE WHEN n <= 100 THEN 3 ELSE 2 END, 'Piece', '{}', 'parked' || n % 100 FROM"
            f" generate_series(1, {blocked}) AS n; INSERT INTO holdfast_work.block (head, stream,"
            " partition, policy) SELECT seq, stream, partition, 2 FROM holdfast_work.job WHERE"
            " state = 3"
        )
        # They have been there for long: on the disk, and known to the planner.
        await connection.execute("VACUUM ANALYZE holdfast_work.job")
        await connection.execute("CHECKPOINT")
        await connection.close()
        return await drain(store, total)


async def with_held(url: str, total: int) -> float:
    """The rate while another transaction has enqueued one job and stays open."""
    async with opened(url) as store:
        connection = await asyncpg.connect(url)
        transaction = connection.transaction()
        await transaction.start()
        await enqueue(connection, JobDraft("Piece", b"{}", "held"))
        try:
            return await drain(store, total)
        finally:
            await transaction.rollback()
            await connection.close()


async def latency(url: str, seconds: float, per_second: int = 1000) -> float:
    """p99 in milliseconds from enqueue to handler, at a steady rate, ten at a time."""
    async with opened(url) as store:
        handlers, seen = Handlers(), list[float]()

        @handlers.handle(Piece, stream=lambda piece: piece.stream)
        async def handle(ctx: Context, piece: Piece) -> None:
            seen.append(time.perf_counter() - piece.at)

        async with Worker(store, handlers, settings=SETTINGS).running():
            warm = [handlers.draft(Piece(f"warm{n}", 0, time.perf_counter())) for n in range(32)]
            await asyncio.gather(*(store.enqueue([piece]) for piece in warm))
            while len(seen) < len(warm):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            seen.clear()
            total, tick = int(seconds * per_second), 10 / per_second
            calls = list[asyncio.Task[Any]]()
            start = time.perf_counter()
            for n in range(0, total, 10):
                await asyncio.sleep(max(0.0, start + n / 10 * tick - time.perf_counter()))
                now = time.perf_counter()
                pieces = [
                    handlers.draft(Piece(f"s{(n + i) % STREAMS}", n + i, now)) for i in range(10)
                ]
                calls.append(asyncio.create_task(store.enqueue(pieces)))
            await asyncio.gather(*calls)
            async with asyncio.timeout(20):
                while len(seen) < total:  # noqa: ASYNC110 - the end of a measurement
                    await asyncio.sleep(0.01)
        return percentile(seen, 99) * 1000


async def sqlite(total: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        store = await SqliteWork.open(Path(folder) / "work.db")
        try:
            return await drain(store, total)
        finally:
            await store.close()


@dataclass
class Runs:
    """What was measured on this server, by name, round by round."""

    url: str
    values: dict[str, list[float]] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)

    async def add(self, name: str, measured: Callable[[], Awaitable[float]]) -> None:
        if name in self.missing:
            return
        await empty(self.url)
        try:
            value = await measured()
        except PeerMissing as error:
            self.missing.add(name)
            say(f"  {name}: skipped, {error}")
            return
        self.values.setdefault(name, []).append(value)
        say(f"  {name:<28}{value:>12,.1f}")

    def medians(self, names: Mapping[str, str]) -> dict[str, float]:
        """By another name, of what was measured."""
        return {
            label: median(self.values[name]) for name, label in names.items() if name in self.values
        }

    def ratios(self, names: Mapping[str, str], base: str = "holdfast") -> dict[str, float]:
        """By another name, the median of each round's ratio to the base in the same
        round: noise hits both.
        """
        known = {label: self.values[name] for name, label in names.items() if name in self.values}
        whole = self.values[base]  # peers are measured in the first rounds only
        return {
            label: median([a / b for a, b in zip(values, whole, strict=False)])
            for label, values in known.items()
        }


async def measure(
    url: str, parts: set[str], quick: bool
) -> tuple[dict[str, float], dict[str, float]]:
    rounds, peer_rounds, jobs = (5, 2, 12_000) if quick else (5, 3, 60_000)
    runs = Runs(url)
    own: dict[str, Callable[[], Awaitable[float]]] = {"holdfast": lambda: holdfast(url, jobs)}
    if "blocked" in parts:
        own["with 100 k blocked"] = lambda: with_blocked(url, jobs, 100_000)
    if "held" in parts:
        own["with a held transaction"] = lambda: with_held(url, jobs)
    if "sqlite" in parts:
        own["sqlite"] = lambda: sqlite(2 * jobs)
    peers: dict[str, Callable[[], Awaitable[float]]] = {
        "pgqueuer 5x10": lambda: pgqueuer(url, jobs // 8, 10),
        "pgqueuer 5x100": lambda: pgqueuer(url, jobs // 4, 100),
        "procrastinate": lambda: procrastinate(url, jobs // 40),
    }
    if not quick:
        peers["graphile worker"] = lambda: graphile(url, jobs // 8)
    for number in range(rounds):
        others = peers if "peers" in parts and number < peer_rounds else {}
        turn = [*own.items(), *others.items()]
        for name, measured in turn if number % 2 == 0 else reversed(turn):
            await runs.add(name, measured)
    if "latency" in parts:
        await runs.add("latency p99 ms", lambda: latency(url, 3 if quick else 10))
    if "crash" in parts:
        await runs.add("rounds after a crash", lambda: crash_recovery_rounds(url))
    if "producers" in parts:
        await runs.add(
            "producers beside a held one",
            lambda: held_transaction_ratio(url, *((5, 0.3) if quick else (7, 2.0))),
        )
    return runs.medians(FIGURES), _ratios(runs)


def _ratios(runs: Runs) -> dict[str, float]:
    beside = runs.medians({"producers beside a held one": "held_transaction_producers"})
    return (
        {name: 1 / slower for name, slower in runs.ratios(PEERS).items()}
        | runs.ratios(COSTS)
        | beside
    )


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    options = arguments(__doc__ or "", PARTS)
    try:
        server = postgres.start()
    except Missing as error:
        say(f"skipped: {error}")
        return
    try:
        parts = set(options.only.split(","))
        figures, ratios = uvloop.run(measure(server.url, parts, options.quick))
    finally:
        server.stop()
    finish("work", figures, ratios, as_json=options.json)


if __name__ == "__main__":
    main()
