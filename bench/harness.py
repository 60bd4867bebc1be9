"""What the benchmarks share: processes that serve, medians, and the last line that
machines read.

A benchmark measures Holdfast and a peer in the same run, one after the other and again
(interleaved), on the same machine, and prints ratios of medians. Benchmarks are not
tests: nothing here fails a build.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

Child = subprocess.Popen[str]
"""A process that serves and obeys; see `process`."""

ROOT = Path(__file__).resolve().parent.parent
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
"""Those that were ours when we began: a benchmark may keep to some of them."""


def arguments(
    description: str, parts: Sequence[str], minutes: float | None = None
) -> argparse.Namespace:
    """--quick, --json and --only, the same for every benchmark; --minutes where
    something goes on for minutes.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if minutes is not None:
        parser.add_argument(
            "--minutes", type=float, default=minutes, help=f"how long a soak takes ({minutes:g})"
        )
    parser.add_argument(
        "--quick", action="store_true", help="fewer and shorter runs; ends within 40 seconds"
    )
    parser.add_argument(
        "--json", action="store_true", help="end with one line of JSON: bench, figures, ratios"
    )
    parser.add_argument("--only", default=",".join(parts), help=f"some of: {', '.join(parts)}")
    return parser.parse_args()


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def interleaved(rounds: int, *measures: Callable[[], float]) -> list[list[float]]:
    """Each measure once per round, in turn, so that a noisy minute hits all of them."""
    results: list[list[float]] = [[] for _ in measures]
    for _ in range(rounds):
        for index, measure in enumerate(measures):
            results[index].append(measure())
    return results


def say(text: str) -> None:
    print(text, flush=True)


def finish(
    bench: str, figures: Mapping[str, float], ratios: Mapping[str, float], *, as_json: bool
) -> None:
    """A table for people; with ``as_json`` also the last line for machines."""
    for title, values in (("figures", figures), ("ratios", ratios)):
        say(f"\n{title}")
        for name, value in values.items():
            say(f"  {name:<32}{value:>14,.3f}")
    if as_json:
        rounded = {
            k: {n: round(v, 4) for n, v in d.items()}
            for k, d in (("figures", figures), ("ratios", ratios))
        }
        say(json.dumps({"bench": bench, **rounded}))


@contextmanager
def process(*command: str, env: Mapping[str, str] | None = None) -> Iterator[tuple[Child, Any]]:
    """One child; see `processes`."""
    with processes(command, env=env) as [only]:
        yield only


@contextmanager
def processes(
    *commands: Sequence[str], env: Mapping[str, str] | None = None
) -> Iterator[list[tuple[Child, Any]]]:
    """Children that print one JSON line when they are ready and obey lines on their
    standard input; started and stopped side by side, stopped by pid.
    """
    children = [
        subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **(env or {})},
        )
        for command in commands
    ]
    try:
        yield [(child, answer(child)) for child in children]
    finally:
        for child in children:
            child.terminate()
        for child in children:
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


@contextmanager
def cores_awake() -> Iterator[None]:
    """Idle work on every core, which anything else interrupts.

    Where one process waits for another its core would go to sleep, and a virtual one is
    back when its host finds the time: what is measured then is the host. For some
    seconds only: hosts slow down who never rests.
    """
    idle = (
        "import os; os.sched_setaffinity(0, {%d}); os.sched_setscheduler(0, os.SCHED_IDLE,"
        " os.sched_param(0))\n"
    )
    idle += 'print("{}", flush=True)\nwhile True: pass'
    with processes(*(("-c", idle % core) for core in CORES)):
        yield


def answer(child: subprocess.Popen[str]) -> Any:
    """The child's next line of JSON; anything else it prints is passed over."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise RuntimeError(f"the process ended with {child.wait()} before it answered")


def ask(child: subprocess.Popen[str], **order: Any) -> Any:
    """Send an order and wait for the answer."""
    assert child.stdin is not None
    child.stdin.write(json.dumps(order) + "\n")
    child.stdin.flush()
    return answer(child)


def cpu_seconds(pid: int) -> float:
    """What a process has used so far: its clock in nanoseconds on Linux, else in ticks of
    10 ms. It is not asked itself: the load would stop meanwhile, and it would go on.
    """
    if sys.platform == "linux":
        return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid(3) does
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def rate(count: int, started: float) -> float:
    return count / (time.perf_counter() - started)
