"""The faults of a history over time, for checkers 8, 10 and 12. (Pure.)

A fault excuses only failures of its own plane and its own clients, while it lasts. By
design two effects outlast it: a breaker that it opened stays open for its rest, and a
cut takes a moment to reach the other side.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from holdfast.verify.history import FaultPlane, FaultWindow, History, Ok, Verb

FELT_SECONDS = 1.0
"""How long a cut may take to reach the other side."""
REST_SECONDS = 30.0
OPENS_AFTER = 5
"""The breaker: this many failures within ``REST_SECONDS`` open it for that time.

A failed probe opens it again.
"""
GIVEN_UP_SECONDS = 5.0
"""A call that hangs counts as failed after this time, not only when the fault ends."""

ASKS: Mapping[FaultPlane, frozenset[Verb]] = {
    "durability": frozenset({"send", "change"}),
    "history": frozenset({"sync", "resume"}),
    "fanout": frozenset(),
    "connection": frozenset(),
    "process": frozenset({"send", "sync", "resume", "change"}),
}
"""The requests that a fault of each plane may fail.

A broken connection fails none: no client is there to get the reply.
"""


class FaultTimeline:
    """The faults of a history by plane and client."""

    def __init__(self, history: History) -> None:
        self._by_plane: dict[FaultPlane, list[FaultWindow]] = defaultdict(list)
        for fault in history.of(FaultWindow):
            self._by_plane[fault.plane].append(fault)
        self._unreachable = {
            client: _merged(self._of_connection(client)) for client in history.clients
        }
        self._open = {plane: self._breaker(history, plane) for plane in ("durability", "history")}

    def of(self, plane: FaultPlane) -> Sequence[FaultWindow]:
        return self._by_plane[plane]

    def faults(
        self, plane: FaultPlane, since: float, until: float, client: str | None = None
    ) -> bool:
        """Whether a fault of this plane affected this client between the two."""
        return any(
            fault.at <= until and fault.until >= since
            for fault in self._by_plane[plane]
            if client is None or not fault.clients or client in fault.clients
        )

    def breaker_open(self, plane: FaultPlane, since: float, until: float) -> bool:
        """Whether the plane's breaker may have been open between the two."""
        return any(
            opened <= until and since <= closed for opened, closed in self._open.get(plane, ())
        )

    def unreachable_seconds(self, client: str, since: float, until: float) -> float:
        """How long nothing could reach this client between the two.

        Its network swallowed bytes, or it did not read.
        """
        return sum(
            max(min(end, until) - max(start, since), 0.0)
            for start, end in self._unreachable[client]
        )

    def _of_connection(self, client: str) -> Iterable[tuple[float, float]]:
        return [
            (f.at, f.until)
            for f in self._by_plane["connection"]
            if not f.clients or client in f.clients
        ]

    def _breaker(self, history: History, plane: FaultPlane) -> list[tuple[float, float]]:
        """When the breaker may have been open. A success or a new process closes it."""
        closings = sorted(
            [
                o.end.at
                for o in history.operations
                if isinstance(o.end, Ok) and o.invoke.verb in ASKS[plane]
            ]
            + [fault.at for fault in self._by_plane["process"]]
        )
        spans: list[tuple[float, float]] = []
        failures: list[float] = []
        faults = self._by_plane[plane]
        given_up = [f.at + GIVEN_UP_SECONDS for f in faults if f.at + GIVEN_UP_SECONDS < f.until]
        for at in sorted([*given_up, *(fault.until for fault in faults)]):
            failures = [*(f for f in failures if f > at - REST_SECONDS), at]
            probed = bool(spans) and not _any_between(closings, spans[-1][1], at)
            if probed or len(failures) >= OPENS_AFTER:
                spans.append((at, at + REST_SECONDS))
        return spans


def _any_between(times: Sequence[float], since: float, until: float) -> bool:
    at = bisect_right(times, since)
    return at < len(times) and times[at] < until


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
