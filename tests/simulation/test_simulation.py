"""A thousand runs of 1 to 3 nodes in which everything breaks; every promise must hold.

``HOLDFAST_SEED=n`` runs one seed, ``HOLDFAST_SEEDS=n`` runs n of them. A seed is the
same run only under the same ``PYTHONHASHSEED``, which ``make test`` draws.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import structlog
from result_counts import ROOT, tally

from holdfast.verify.checkers import CHECKERS, Verdict, check, red
from holdfast.verify.history import Header, History, encode
from proof.controls import CONTROLS, only_faults
from proof.coverage_marks import collected
from proof.faults import Odds
from proof.invariants import INVARIANTS
from proof.results import Row
from proof.simulation import Options, Parts, play
from proof.simulation.world import SETTLED

ELSEWHERE = {15}
"""Judged where replies are: ``test_reply_…``."""
SEEDS = range(1, int(os.environ.get("HOLDFAST_SEEDS", "1000")) + 1)


def complaints(seed: int, history: History, verdicts: list[Verdict]) -> list[str]:
    verdicts = [*verdicts, *(invariant(history) for invariant in INVARIANTS.values())]
    broken = [str(verdict) for verdict in verdicts if not verdict.ok]
    if not history.of(Header)[0].notes[SETTLED]:
        broken.append("after the faults ended, not every device or reader caught up")
    return [f"{repeat(seed)}: {Options.derive(seed)}", *broken] if broken else []


def repeat(seed: int) -> str:
    """What repeats a run: the product goes through sets, too."""
    order = os.environ.get("PYTHONHASHSEED", "unknown")
    return f"PYTHONHASHSEED={order} HOLDFAST_SEED={seed}"


@dataclass(slots=True)
class Played:
    """The results of many runs."""

    operations: int = 0
    examined: Counter[int] = field(default_factory=Counter)
    failed: dict[int, list[str]] = field(default_factory=dict)
    reached: Counter[str] = field(default_factory=Counter)

    def __iadd__(self, other: Played) -> Played:
        self.operations += other.operations
        self.examined += other.examined
        self.failed |= other.failed
        self.reached += other.reached
        return self


def play_many(seeds: Sequence[int]) -> Played:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    played = Played()
    with collected() as played.reached:
        for seed in seeds:
            history = play(seed)
            verdicts = check(history)
            played.operations += len(history.operations)
            for number, verdict in zip(CHECKERS, verdicts, strict=True):
                played.examined[number] += verdict.examined
            if found := complaints(seed, history, verdicts):
                played.failed[seed] = found
    return played


@pytest.mark.covers("000 isolation_holds")
@pytest.mark.long
def test_every_promise_holds_in_a_thousand_runs_that_reach_every_coverage_mark(
    tmp_path: Path,
) -> None:
    if (only := os.environ.get("HOLDFAST_SEED")) is not None:
        history = play(int(only))
        (tmp_path / "history.jsonl").write_bytes(encode(history.events))
        found = complaints(int(only), history, check(history))
        assert not found, "\n".join([*found, f"history: {tmp_path}"])
        return
    began, played = time.perf_counter(), Played()
    with ProcessPoolExecutor() as cores:
        for part in cores.map(
            play_many, (SEEDS[start : start + 50] for start in range(0, len(SEEDS), 50))
        ):
            played += part
    for found in list(played.failed.values())[:3]:
        print("\n".join(found))
    facts = sum(played.examined.values())
    tally(
        Row(
            name="simulation",
            how="virtual time, 1–3 nodes; faults of network, store and fanout; kills, pauses,"
            " partitions, failovers that lose commits",
            runs=len(SEEDS),
            failures=len(played.failed),
            requirement="0 broken promises",
            seed=f"{SEEDS[0]}..{SEEDS[-1]}",
            seconds=time.perf_counter() - began,
            figures={"operations": f"{played.operations:,}", "facts examined": f"{facts:,}"},
        ),
        played.reached,
        whole=len(SEEDS) >= 1000,
    )
    assert played.examined.keys() == CHECKERS.keys() - ELSEWHERE, "a checker examined nothing"
    assert {Options.derive(seed).servers for seed in SEEDS[:3]} == {1, 2, 3}


PLAYED = """
import hashlib, sys
import structlog
from holdfast.verify.history import encode
from proof.simulation import play

structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
for seed in sys.argv[1:]:
    print(seed, hashlib.sha256(encode(play(int(seed)).events)).hexdigest())
"""


def test_twenty_seeds_run_twice_are_the_same_byte_for_byte() -> None:
    """In two interpreters, one of which takes them in reverse."""
    seeds = [f"{seed}" for seed in range(1, 21)]
    path = os.pathsep.join(str(ROOT / part) for part in ("src", "tests"))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "1"}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", PLAYED, *order],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for order in (seeds, seeds[::-1])
    ]
    first, second = [process.communicate()[0].splitlines() for process in both]
    assert len(first) == len(seeds) and first == second[::-1]


def test_a_seed_that_fails_prints_itself_and_everything_derived_from_it() -> None:
    control = next(each for each in CONTROLS if each.name == "two-phase allocation")
    history = next(h for h in (play(seed, control.parts) for seed in SEEDS) if red(check(h)))
    first, *broken = complaints(7, history, check(history))
    assert (
        first == f"{repeat(7)}: {Options.derive(7)}"
        and "writes=Odds(" in first
        and "latency_seconds" in first
    )
    assert any("BROKEN" in verdict for verdict in broken)


def test_different_seeds_are_different_runs() -> None:
    assert len({encode(play(seed).events) for seed in range(1, 6)}) == 5


@pytest.mark.parametrize("seed", [84, 111, 245, 278, 281, 295])
def test_user_added_while_fanout_fails_gets_the_chat_without_another_message(seed: int) -> None:
    """In these runs the event of joining was skipped, the removal before it was not,
    and the chat stayed quiet.
    """
    often = only_faults(fanout=Odds(fail=0.75), membership_changes=4, sends_per_device=1)
    verdicts = check(play(seed, Parts(options=often)))
    assert red(verdicts) == set(), "\n".join(map(str, verdicts))
