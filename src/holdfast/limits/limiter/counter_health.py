"""How well the shared counters answer: the ratio of recent decisions made without them.

A single success proves little: a Redis that rejects half of its calls answers every
other ping. So each heartbeat adds the decisions since the last one, with and without
the counters, and counts itself as one. The ratio over a window of heartbeats gives the
state. Each change of state is logged once, with its reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from holdfast import telemetry
from holdfast.limits.counters.contract import CountersTrouble

CountersState = Literal["up", "degraded", "down"]

WINDOW_SECONDS = 10.0
"""The period the ratio covers, unless tuned."""
DEGRADED_RATIO_MAX = 0.1
"""Above this ratio the counters are not up. One lost heartbeat in ten is still up."""

_NO_ANSWER = CountersTrouble("timeout", "no answer within the deadline of a check")
_DEGRADED = frozenset(("local_share", "open", "closed"))


class CounterHealth:
    """``state``, and the last ``trouble`` while it is not ``up``."""

    def __init__(self, heartbeat_seconds: float, window_seconds: float = WINDOW_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._beats: deque[tuple[int, int]] = deque(
            maxlen=max(1, round(window_seconds / heartbeat_seconds))
        )
        """Per heartbeat: decisions, and how many of them were degraded."""
        self._up = True
        self._logged: set[str] = set()
        """Reasons logged since the counters were last up."""
        self.trouble: CountersTrouble | None = None

    @property
    def ratio(self) -> float:
        """Decisions without the counters ÷ decisions, over the window."""
        answers = sum(all_ for all_, _ in self._beats)
        return sum(degraded for _, degraded in self._beats) / answers if answers else 0.0

    @property
    def state(self) -> CountersState:
        if self._up:
            return "up"
        answers, degraded = self._beats[-1]
        return "down" if degraded == answers else "degraded"

    def observe(
        self, tally: Mapping[str, Sequence[int]], alive: bool, trouble: CountersTrouble | None
    ) -> None:
        """Add a heartbeat: the decisions since the last; was it answered; why not."""
        asked = sum(sum(counts) for by, counts in tally.items() if by != "no_rule")
        degraded = sum(sum(counts) for by, counts in tally.items() if by in _DEGRADED)
        self._beats.append((asked + 1, degraded + (not alive)))
        self._up = self.ratio <= DEGRADED_RATIO_MAX
        if not self._up:
            self.trouble = trouble = trouble or self.trouble or _NO_ANSWER
            if trouble.reason not in self._logged:
                self._logged.add(trouble.reason)
                telemetry.log.error(
                    "limits.counters_unavailable", **trouble._asdict(), **self._facts()
                )
        elif self._logged:
            self._logged.clear()
            self.trouble = None
            telemetry.log.info("limits.counters_available", **self._facts())

    def status(self) -> dict[str, Any]:
        trouble = self.trouble
        return {
            "degraded_ratio": round(self.ratio, 3),
            "counters_reason": trouble.reason if trouble else "",
            "counters_detail": trouble.detail if trouble else "",
        }

    def _facts(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "degraded_ratio": round(self.ratio, 3),
            "window_seconds": self._window_seconds,
        }
