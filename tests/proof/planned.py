"""The planned faults, how often each must run, and which of them a run did not cover.

RESULTS.md is honest only if it also says what was not run: ``uncovered`` gives, for
each planned fault, the number of its runs and the part that none of them covers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Planned:
    """``rows``: the proofs that count for it.

    ``missing``: the part that none of them covers.
    """

    fault: str
    runs: int
    rows: frozenset[str] = frozenset()
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Uncovered:
    """A planned fault that did not run in full."""

    planned: Planned
    ran: int


_TESTED = "tested, not counted"
PLAN = (
    Planned(
        "kill -9 of each role, half at named points",
        1_000,
        frozenset({"kill -9"}),
        "roles in processes of their own: one process has them all. Killed workers and a kill"
        f" between publishing and its mark: {_TESTED}"
        " (`test_work_torture.py`, `test_kill_crash_rows.py`)",
    ),
    Planned(
        "power cut",
        2_000,
        frozenset({"power cut", "power cut of work.db", "power cut of limits.db"}),
    ),
    Planned(
        "SIGSTOP longer than leases",
        300,
        frozenset({"SIGSTOP of a node", "SIGSTOP of PostgreSQL", "node paused beyond its lease"}),
        f"a worker and Redis: {_TESTED} (`test_work_torture.py`, `test_limits_failures.py`,"
        " `test_cluster_redis_faults.py`); Kafka: nothing",
    ),
    Planned(
        "partition, one-way, flapping",
        200,
        frozenset({"partitions of a node of four"}),
        f"between limiters, Redis and PostgreSQL: {_TESTED} (`test_limits_failures.py`, by the"
        " proxy)",
    ),
    Planned("disk slow, EIO, ENOSPC", 100, frozenset({"disk faults"})),
    Planned(
        "clock jumps of an hour",
        100,
        frozenset({"clock jumps", "clocks of nodes hours apart"}),
        "PostgreSQL and Redis keep the machine's clock",
    ),
    Planned(
        "Redis flush, stop, kill, old RDB restored",
        100,
        frozenset({"redis faults", "Redis of a cluster fails"}),
    ),
    Planned("Kafka broker down, leader change", 100, frozenset(), "the engine does not exist yet"),
    Planned(
        "DynamoDB throttle, conflict, 5xx, lost reply",
        500,
        frozenset(),
        "the engine does not exist yet",
    ),
    Planned(
        "PostgreSQL failover: lossless, undeclared, with losses",
        50,
        frozenset(
            {
                "failover of PostgreSQL declared lossless",
                "failover of PostgreSQL undeclared",
                "failover of PostgreSQL that loses commits",
            }
        ),
    ),
    Planned(
        "overload ×10, 2,000 slow readers, reconnect storm",
        20,
        frozenset(),
        "slow readers one at a time and in the simulation; no load of this size",
    ),
)


def uncovered(runs: Mapping[str, int]) -> Iterator[Uncovered]:
    """The planned faults that these runs without a failure (by proof) do not cover."""
    for planned in PLAN:
        ran = sum(runs.get(name, 0) for name in planned.rows)
        if ran < planned.runs or planned.missing:
            yield Uncovered(planned, ran)
