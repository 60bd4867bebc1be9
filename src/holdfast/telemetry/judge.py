"""Judges alerts over the metrics of this process, as Prometheus would. (Pure.)

``Judge.judge`` is called with the samples of one moment. It remembers what windows
need, evaluates every rule and moves its alerts: a condition that holds makes an alert
pending, one that has held for ``for_seconds`` makes it firing, and a firing alert whose
condition does not hold any more is resolved. One alert of a rule for each set of
labels.

Expressions mean what they mean in PromQL, the extrapolation of ``increase`` and the
interpolation of ``histogram_quantile`` included; a test compares both judges. A series
that is missing at a moment is gone from that moment on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import add
from typing import Literal

from holdfast.telemetry.alert import Alert, AlertRule, rules
from holdfast.telemetry.expressions import (
    PREFIX,
    Absent,
    Expression,
    Increase,
    LabelSet,
    Plus,
    Quantile,
    Ratio,
    Series,
    Sum,
)

Values = Mapping[LabelSet, float]
Samples = Mapping[str, Values]
"""The samples of a moment: by name without ``holdfast_``, then by labels."""
_Step = Callable[[Samples, float, Sequence[Values]], Values]
"""The values of an expression, from the samples, the time, and those before it."""
_Moments = deque[tuple[float, float, int]]
AlertState = Literal["pending", "firing", "resolved"]
EXTRAPOLATED_MAX = 1.1
"""A window is extended to its bounds if these are less than 1.1 pauses between samples
away, else by half a pause.
"""


@dataclass(frozen=True, slots=True)
class AlertInstance:
    """An alert for one set of labels. ``since``: when its condition began to hold;
    ``fired_at``: 0 while pending.
    """

    rule: AlertRule
    labels: LabelSet
    state: AlertState
    since: float
    value: float
    fired_at: float = 0.0


class Windows:
    """Some expressions, and what they need of the past. Each part of them is evaluated
    once at a moment, however many are made of it.
    """

    def __init__(self, expressions: Iterable[Expression]) -> None:
        self._steps: list[_Step] = []
        self._places: dict[Expression, int] = {}
        self._rises: list[_Rises] = []
        self._wanted = [self._place(each) for each in expressions]
        self.names = frozenset(each.name for each in self._places if isinstance(each, Series))
        """The names of the samples that ``take`` needs."""

    def take(self, samples: Samples, now: float) -> list[Values]:
        """Take the samples of this moment; returns the values of each expression."""
        found: list[Values] = []
        for step in self._steps:
            found.append(step(samples, now, found))
        return [found[place] for place in self._wanted]

    def forget(self, now: float) -> None:
        """Forget the samples that were taken at this moment."""
        for rises in self._rises:
            rises.forget(now)

    def _place(self, value: Expression) -> int:
        """Of its values among those of a moment, behind what it is made of."""
        if value not in self._places:
            step = self._step(value)
            self._places[value] = len(self._steps)
            self._steps.append(step)
        return self._places[value]

    def _step(self, value: Expression) -> _Step:
        match value:
            case Series():
                return _selected(value)
            case Increase(of=of, seconds=seconds):
                self._rises.append(rises := _Rises(self._place(of), seconds))
                return rises.take
            case Sum(of=of, without=without):
                return _summed(self._place(of), frozenset(without))
            case Ratio(part=left, whole=right):
                return _joined(_divided, self._place(left), self._place(right))
            case Plus(left=left, right=right):
                return _joined(add, self._place(left), self._place(right))
            case Quantile(quantile=quantile, of=of):
                return _quantiles(self._place(of), quantile)
            case Absent(series=series):
                return _absent([(self._place(each), each.name) for each in series])


class Judge:
    """All rules of some alerts, and what their windows have seen."""

    def __init__(self, alerts: Iterable[Alert]) -> None:
        self._rules = tuple(rules(alerts))
        self._windows = Windows(rule.condition.value for rule in self._rules)
        self.names = self._windows.names
        """The names of the samples that ``judge`` needs."""
        self._alerts: list[dict[LabelSet, AlertInstance]] = [{} for _ in self._rules]

    @property
    def alerts(self) -> list[AlertInstance]:
        """Those that are pending or firing, in the order of the list."""
        return [each for alerts in self._alerts for each in alerts.values()]

    def judge(self, samples: Samples, now: float) -> list[AlertInstance]:
        """Take the samples of this moment; returns what fired and what was resolved."""
        found = self._windows.take(samples, now)
        changed: list[AlertInstance] = []
        for rule, alerts, values in zip(self._rules, self._alerts, found, strict=True):
            holds = rule.condition.holds
            held = {labels: value for labels, value in values.items() if holds(value)}
            for labels in [each for each in alerts if each not in held]:
                ended = alerts.pop(labels)
                if ended.state == "firing":
                    changed.append(replace(ended, state="resolved"))
            for labels, value in held.items():
                before = alerts.get(labels) or AlertInstance(rule, labels, "pending", now, value)
                after = _moved(before, value, now)
                alerts[labels] = after
                if after.state != before.state:
                    changed.append(after)
        return changed


def _moved(alert: AlertInstance, value: float, now: float) -> AlertInstance:
    if alert.state == "pending" and now - alert.since >= alert.rule.condition.for_seconds:
        return replace(alert, state="firing", value=value, fired_at=now)
    return replace(alert, value=value)


def window_seconds(value: Expression) -> int:
    """How far back an expression looks; 0 if only at the present."""
    return max((each.seconds for each in _increases(value)), default=0)


def _increases(value: Expression) -> list[Increase]:
    match value:
        case Increase():
            return [value]
        case Sum(of=of) | Quantile(of=of):
            return _increases(of)
        case Ratio(part=left, whole=right) | Plus(left=left, right=right):
            return [*_increases(left), *_increases(right)]
        case Series() | Absent():
            return []


class _Rises:
    """How much each series of a counter rose in the last ``seconds``, as Prometheus'
    ``increase`` has it. Of every moment within them it keeps the time, the value, and
    how often the counter had restarted by then.
    """

    def __init__(self, place: int, seconds: int) -> None:
        self._place, self._seconds = place, seconds
        self.kept: dict[LabelSet, _Moments] = {}

    def take(self, samples: Samples, now: float, found: Sequence[Values]) -> Values:
        kept, start = self.kept, now - self._seconds
        for labels, value in found[self._place].items():
            if moments := kept.get(labels):
                _, before, restarts = moments[-1]
                moments.append((now, value, restarts + (value < before)))
            else:
                kept[labels] = deque([(now, value, 0)])
        rises: dict[LabelSet, float] = {}
        for labels, moments in list(kept.items()):
            while moments and moments[0][0] < start:
                moments.popleft()
            if not moments:
                del kept[labels]
            elif (rise := _rise(moments, now, start)) is not None:
                rises[labels] = rise
        return rises

    def forget(self, now: float) -> None:
        for moments in self.kept.values():
            if moments and moments[-1][0] == now:
                moments.pop()


def _rise(moments: _Moments, now: float, start: float) -> float | None:
    """None without samples of two moments. In the order in which Prometheus calculates,
    for a rounded value may be a threshold.
    """
    (first_at, first, restarts_before), (last_at, last, restarts) = moments[0], moments[-1]
    rise, sampled = last - first, last_at - first_at
    if not sampled:
        return None
    if restarts > restarts_before:
        for (_, before, _), (_, after, _) in pairwise(moments):
            rise += before if after < before else 0.0
    if not rise:
        return 0.0
    to_start, to_end = first_at - start, now - last_at
    if first >= 0:
        to_start = min(to_start, sampled * (first / rise))  # a counter is never below 0
    pause = sampled / (len(moments) - 1)
    covered = sampled
    for each in (to_start, to_end):
        covered += each if each < pause * EXTRAPOLATED_MAX else pause / 2
    return rise * (covered / sampled)


def _selected(series: Series) -> _Step:
    known: dict[LabelSet, bool] = {}
    """Which labels it accepts."""

    def take(samples: Samples, now: float, found: Sequence[Values]) -> Values:
        values = samples.get(series.name, {})
        if not series.matches:
            return values
        for labels in values:
            if labels not in known:
                known[labels] = series.accepts(labels)
        return {labels: value for labels, value in values.items() if known[labels]}

    return take


def _summed(place: int, without: frozenset[str]) -> _Step:
    known: dict[LabelSet, LabelSet] = {}
    """What is left of labels."""

    def take(samples: Samples, now: float, found: Sequence[Values]) -> Values:
        sums: dict[LabelSet, float] = {}
        for labels, value in found[place].items():
            if (key := known.get(labels)) is None:
                key = known[labels] = tuple(each for each in labels if each[0] not in without)
            sums[key] = sums.get(key, 0.0) + value
        return sums

    return take


def _joined(of_two: Callable[[float, float], float], left: int, right: int) -> _Step:
    def take(samples: Samples, now: float, found: Sequence[Values]) -> Values:
        one, two = found[left], found[right]
        return {labels: of_two(one[labels], two[labels]) for labels in one if labels in two}

    return take


def _absent(series: Iterable[tuple[int, str]]) -> _Step:
    keys = [(place, (("metric", PREFIX + name),)) for place, name in series]

    def take(samples: Samples, now: float, found: Sequence[Values]) -> Values:
        return {key: 1.0 for place, key in keys if not found[place]}

    return take


def _divided(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return math.copysign(math.inf, part) if part else math.nan


def _quantiles(place: int, quantile: float) -> _Step:
    known: dict[LabelSet, tuple[LabelSet, float]] = {}
    """Of a bucket: its histogram and its bound."""

    def take(samples: Samples, now: float, found: Sequence[Values]) -> Values:
        histograms: dict[LabelSet, list[tuple[float, float]]] = {}
        for labels, count in found[place].items():
            if (bucket := known.get(labels)) is None:
                bound = next((float(value) for name, value in labels if name == "le"), math.nan)
                key = tuple(each for each in labels if each[0] != "le")
                bucket = known[labels] = key, bound
            histograms.setdefault(bucket[0], []).append((bucket[1], count))
        return {key: _quantile(quantile, sorted(buckets)) for key, buckets in histograms.items()}

    return take


def _quantile(quantile: float, buckets: list[tuple[float, float]]) -> float:
    """As Prometheus' ``histogram_quantile``: linear within the bucket it falls into,
    the last bound if it falls into the bucket without one.
    """
    highest, counts = 0.0, list[float]()
    for _, count in buckets:
        counts.append(highest := max(highest, count))
    if len(buckets) < 2 or not counts[-1] or buckets[-1][0] != math.inf:
        return math.nan
    rank = quantile * counts[-1]
    place = next(
        (place for place, count in enumerate(counts[:-1]) if count >= rank), len(counts) - 1
    )
    if place == len(counts) - 1:
        return buckets[-2][0]
    end, within = buckets[place][0], counts[place]
    if place == 0 and end <= 0:
        return end
    start, below = (buckets[place - 1][0], counts[place - 1]) if place else (0.0, 0.0)
    return start + (end - start) * ((rank - below) / (within - below))
