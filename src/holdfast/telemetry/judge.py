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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
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
    series_of,
)

Values = Mapping[LabelSet, float]
Samples = Mapping[str, Values]
"""The samples of a moment: by name without ``holdfast_``, then by labels."""
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
    """What some expressions need of the past."""

    def __init__(self, expressions: Iterable[Expression]) -> None:
        read = tuple(expressions)
        self.names = frozenset(each.name for value in read for each in series_of(value))
        """The names of the samples that ``take`` needs."""
        found = dict.fromkeys(each for value in read for each in _increases(value))
        self._windows: dict[Increase, dict[LabelSet, _Window]] = {each: {} for each in found}

    def take(self, samples: Samples, now: float) -> Evaluation:
        """Take the samples of this moment; returns the expressions' values at it."""
        for increase, windows in self._windows.items():
            _extend(windows, increase, samples.get(increase.of.name, {}), now)
        return Evaluation(samples, self._windows, now)

    def forget(self, now: float) -> None:
        """Forget the samples that were taken at this moment."""
        for windows in self._windows.values():
            for window in windows.values():
                if window.samples and window.samples[-1][0] == now:
                    window.samples.pop()


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
        evaluation = self._windows.take(samples, now)
        changed: list[AlertInstance] = []
        for rule, alerts in zip(self._rules, self._alerts, strict=True):
            condition = rule.condition
            held = {
                labels: value
                for labels, value in evaluation.values(condition.value).items()
                if condition.holds(value)
            }
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


@dataclass(slots=True)
class _Window:
    """The samples of one counter within the last ``seconds``: their times, values, and
    how much it had risen since the first sample, restarts left out.
    """

    samples: deque[tuple[float, float, float]]

    def add(self, now: float, value: float, seconds: int) -> None:
        risen = 0.0
        if self.samples:
            _, before, risen = self.samples[-1]
            risen += value - before if value >= before else value
        self.samples.append((now, value, risen))
        self.trim(now, seconds)

    def trim(self, now: float, seconds: int) -> None:
        while self.samples and self.samples[0][0] < now - seconds:
            self.samples.popleft()

    def increase(self, now: float, seconds: int) -> float | None:
        """As Prometheus' ``increase``; None without samples of two moments."""
        if len(self.samples) < 2:
            return None
        (first_at, first, risen_before), (last_at, _, risen) = self.samples[0], self.samples[-1]
        rise, sampled = risen - risen_before, last_at - first_at
        if not sampled:
            return None
        to_start, to_end = first_at - (now - seconds), now - last_at
        if rise > 0 and first >= 0:
            to_start = min(to_start, sampled * first / rise)  # a counter is never below 0
        pause = sampled / (len(self.samples) - 1)
        near = pause * EXTRAPOLATED_MAX
        covered = sampled + sum(each if each < near else pause / 2 for each in (to_start, to_end))
        return rise * covered / sampled


def _extend(
    windows: dict[LabelSet, _Window], increase: Increase, values: Values, now: float
) -> None:
    for labels, value in values.items():
        if (window := windows.get(labels)) is None:
            if not increase.of.accepts(labels):
                continue
            window = windows[labels] = _Window(deque())
        window.add(now, value, increase.seconds)
    for labels in [each for each in windows if each not in values]:
        windows[labels].trim(now, increase.seconds)
        if not windows[labels].samples:
            del windows[labels]


class Evaluation:
    """Evaluates expressions at one moment; each once."""

    def __init__(
        self, samples: Samples, windows: Mapping[Increase, Mapping[LabelSet, _Window]], now: float
    ) -> None:
        self._samples, self._windows, self._now = samples, windows, now
        self._known: dict[int, Values] = {}

    def values(self, value: Expression) -> Values:
        """By identity: the list shares its expressions."""
        if (found := self._known.get(id(value))) is None:
            found = self._known[id(value)] = self._evaluate(value)
        return found

    def _evaluate(self, value: Expression) -> Values:
        match value:
            case Series(name=name):
                found = self._samples.get(name, {})
                return {labels: each for labels, each in found.items() if value.accepts(labels)}
            case Increase(seconds=seconds):
                risen = {
                    labels: window.increase(self._now, seconds)
                    for labels, window in self._windows[value].items()
                }
                return {labels: each for labels, each in risen.items() if each is not None}
            case Sum(of=of, without=without):
                return _summed(self.values(of), frozenset(without))
            case Ratio(part=part, whole=whole):
                left, right = self.values(part), self.values(whole)
                return {key: _divided(left[key], right[key]) for key in left if key in right}
            case Plus(left=one, right=two):
                left, right = self.values(one), self.values(two)
                return {key: left[key] + right[key] for key in left if key in right}
            case Quantile(quantile=quantile, of=of):
                return _quantiles(quantile, self.values(of))
            case Absent(series=series):
                return {
                    (("metric", PREFIX + each.name),): 1.0
                    for each in series
                    if not self.values(each)
                }


def _summed(values: Values, without: frozenset[str]) -> Values:
    sums: dict[LabelSet, float] = {}
    for labels, value in values.items():
        key = tuple(each for each in labels if each[0] not in without)
        sums[key] = sums.get(key, 0.0) + value
    return sums


def _divided(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return math.copysign(math.inf, part) if part else math.nan


def _quantiles(quantile: float, values: Values) -> Values:
    histograms: dict[LabelSet, list[tuple[float, float]]] = {}
    for labels, count in values.items():
        bound = next((float(value) for name, value in labels if name == "le"), math.nan)
        key = tuple(each for each in labels if each[0] != "le")
        histograms.setdefault(key, []).append((bound, count))
    return {key: _quantile(quantile, sorted(buckets)) for key, buckets in histograms.items()}


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
