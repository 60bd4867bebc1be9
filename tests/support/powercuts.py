"""Power cuts under any file: a cut per seed, and how the proof reports them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from result_counts import tally

from proof.results import Row

Synchronous = Literal["FULL", "NORMAL"]
Report = TypeVar("Report")
Cut = Callable[[Path, int, Synchronous], Coroutine[Any, Any, Report]]
"""Works on a file in an empty folder until a power cut; reports what is left."""


@dataclass(frozen=True)
class Cuts(Generic[Report]):
    """What the cuts of some seeds reported, and how long they took."""

    reports: Sequence[Report]
    seconds: float

    @classmethod
    def made(
        cls, cut: Cut[Report], folder: Path, count: int, synchronous: Synchronous = "FULL"
    ) -> Cuts[Report]:
        """With the seeds from 0, each in a folder of its own."""
        began, reports = time.monotonic(), list[Report]()
        for seed in range(count):
            place = folder / f"{synchronous.lower()}-{seed}"
            place.mkdir()
            reports.append(asyncio.run(cut(place, seed, synchronous)))
        return cls(reports, time.monotonic() - began)

    def tally(self, name: str, how: str, requirement: str, failures: int, **figures: int) -> None:
        """Keep the counts of this proof; fails if a promise was broken."""
        runs = len(self.reports)
        tally(
            Row(name, how, runs, failures, requirement, f"0..{runs - 1}", "", self.seconds, figures)
        )
