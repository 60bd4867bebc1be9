"""Series on which an alert must fire, and on which it must not, made from its rules.

A case gives an expression a value: gauges that stand still, counters that rise evenly.
What an expression must not read is there too, and large (the ``decoys``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from holdfast import telemetry
from holdfast.telemetry.alert import Alert, AlertRule, Severity, rules
from holdfast.telemetry.expressions import (
    PREFIX,
    Absent,
    Condition,
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
from holdfast.telemetry.judge import Judge

STEP_SECONDS = 15
SPAN_SECONDS = 300
"""A counter rises for at most this time; a longer window holds all of that."""
WHOLE = 1000.0
"""What a ratio divides by."""
DECOY = 100_000.0

Key = tuple[str, LabelSet]
"""A series: its name without ``holdfast_``, and its labels."""


class Segment(NamedTuple):
    """``count`` samples from ``start`` on, ``step`` apart; of NaN: the series is gone."""

    start: float
    step: float
    count: int

    def __str__(self) -> str:
        """As promtool reads it."""
        if math.isnan(self.start):
            return "stale" + f" _x{self.count - 1}" * (self.count > 1)
        sign = "-" if self.step < 0 else "+"
        return f"{_plain(self.start)}{sign}{_plain(abs(self.step))}x{self.count - 1}"


def _plain(number: float) -> str:
    """Without an exponent, which promtool does not read."""
    return f"{number:.12f}".rstrip("0").rstrip(".")


class Check(NamedTuple):
    """Which severities of the alert fire at a moment."""

    at_seconds: int
    firing: frozenset[tuple[Severity, LabelSet]]


@dataclass(frozen=True)
class Case:
    alert: Alert
    name: str
    series: Mapping[Key, list[Segment]]
    checks: list[Check]


@dataclass
class Shape:
    """Series under construction: gauges by value, counters by rise per second."""

    gauges: dict[Key, float] = field(default_factory=dict)
    rates: dict[Key, float] = field(default_factory=dict)

    def give(self, value: Expression, wanted: float) -> None:
        """Make the expression have this value."""
        match value:
            case Series():
                self._give(self.gauges, value, wanted)
            case Increase(of=of, seconds=seconds):
                self._give(self.rates, of, wanted / min(seconds, SPAN_SECONDS))
            case Sum(of=of):
                self.give(of, wanted)
            case Plus(left=left, right=right):
                self.give(right, wanted - self._present(left))
            case Ratio(part=part, whole=whole):
                self.give(part, wanted * WHOLE)
                self.give(whole, WHOLE)
            case Quantile(of=of):
                for bound, share in _buckets(of.of.name, wanted):
                    self.rates[of.of.name, (("le", bound),)] = share
            case Absent(series=series):
                for each in series if not wanted else series[1:]:
                    self._give(self.gauges, each, 1.0)

    def _present(self, value: Expression) -> float:
        """What a sum or a rise amounts to already."""
        match value:
            case Sum(of=of):
                return self._present(of)
            case Increase(of=of, seconds=seconds):
                return min(seconds, SPAN_SECONDS) * sum(_accepted(self.rates, of))
            case Series():
                return sum(_accepted(self.gauges, value))
            case _:
                raise TypeError(f"no case for a sum with {value}")

    def _give(self, values: dict[Key, float], series: Series, wanted: float) -> None:
        present = sum(_accepted(values, series))
        key = (series.name, _labels(series, other=bool(present)))
        values[key] = values.get(key, 0.0) + wanted - present
        for label, how, what in series.matches:
            if how in ("!=", "!~"):
                excluded = what.removesuffix(".*") + ("x" if "*" in what else "")
                decoy = dict(_labels(series, other=False)) | {label: excluded}
                values.setdefault((series.name, tuple(sorted(decoy.items()))), DECOY)


def _accepted(values: Mapping[Key, float], series: Series) -> Iterator[float]:
    for (name, labels), value in values.items():
        if name == series.name and series.accepts(labels):
            yield value


def _labels(series: Series, *, other: bool) -> LabelSet:
    """Labels that the series accepts; ``other``: not those that were given before."""
    chosen = {}
    for label, how, what in series.matches:
        if how == "=":
            chosen[label] = what
        elif how == "=~":
            chosen[label] = what.split("|")[0].replace(".*", "one")
        else:
            chosen[label] = "other" if other else "one"
    return tuple(sorted(chosen.items()))


def _buckets(name: str, wanted: float) -> list[tuple[str, float]]:
    """Ten observations a second, all in the bucket of ``wanted``."""
    bounds = [
        sample.labels["le"]
        for metric in telemetry.REGISTRY.collect()
        if metric.name == PREFIX + name.removesuffix("_bucket")
        for sample in metric.samples
        if sample.name.endswith("_bucket")
    ]
    return [(bound, 10.0 if float(bound) >= wanted else 0.0) for bound in bounds]


def together(all_cases: Iterable[Case]) -> list[Case]:
    """The cases side by side, each on an instance of its own, so that one test of
    promtool has all of them: it evaluates every rule at each step of each test.
    """
    found = list(all_cases)
    steps = max(_steps(segments) for case in found for segments in case.series.values())
    placed = [_at_instance(case, f"case {n}", steps) for n, case in enumerate(found)]
    everything = {key: segments for series in placed for key, segments in series.items()}
    states = {
        alert.name: judged(alert, reads(alert, everything))
        for alert in {case.alert.name: case.alert for case in found}.values()
    }
    return [
        replace(
            case,
            series=series,
            checks=[
                Check(each.at_seconds, states[case.alert.name][each.at_seconds // STEP_SECONDS])
                for each in case.checks
            ],
        )
        for case, series in zip(found, placed, strict=True)
    ]


def _at_instance(case: Case, name: str, steps: int) -> dict[Key, list[Segment]]:
    """Its series with this label; they are gone after their end."""
    return {
        (metric, tuple(sorted((*labels, ("instance", name))))): [
            *segments,
            Segment(math.nan, 0, steps - _steps(segments)),
        ]
        for (metric, labels), segments in case.series.items()
    }


def _steps(segments: Iterable[Segment]) -> int:
    return sum(each.count for each in segments)


def reads(alert: Alert, series: Mapping[Key, list[Segment]]) -> dict[Key, list[Segment]]:
    """Those of the series that the alert reads."""
    read = [each for rule in rules([alert]) for each in series_of(rule.condition.value)]
    return {
        (name, labels): segments
        for (name, labels), segments in series.items()
        if any(each.name == name and each.accepts(labels) for each in read)
    }


def cases(alert: Alert) -> Iterator[Case]:
    """For every rule of the alert: one where it fires and then clears, and one where
    it stays silent.
    """
    for rule in rules([alert]):
        beyond, within = _sides(rule.condition)
        yield _case(rule, f"{rule.severity} fires and clears", beyond, fires=True)
        yield _case(rule, f"{rule.severity} stays silent", within, fires=False)


def _sides(condition: Condition) -> tuple[float, float]:
    """A value beyond the threshold, and one within."""
    threshold = condition.threshold
    match condition.compare:
        case "==":
            return threshold, 1 - threshold
        case "<":
            return threshold * 0.95, min(threshold * 1.05, (threshold + 1) / 2)
        case _:
            return (threshold * 1.05, threshold * 0.95) if threshold else (1.0, 0.0)


def _case(rule: AlertRule, name: str, value: float, *, fires: bool) -> Case:
    condition, step = rule.condition, STEP_SECONDS
    window = max((each for each in _windows(condition.value)), default=0)
    is_long = window > SPAN_SECONDS
    held = math.ceil((min(window, SPAN_SECONDS) + condition.for_seconds) / step) + 2
    quiet = 0 if is_long or not fires else math.ceil(window / step) + 2
    series = _series(condition, value, held, quiet)
    if isinstance(condition.value, Absent) and fires:
        missing = condition.value.series[0]
        key = (missing.name, _labels(missing, other=False))
        series[key] = [Segment(math.nan, 0, held), Segment(1, 0, quiet)]
    times = [(held - 1) * step, *([(held + quiet - 1) * step] if quiet else [])]
    if fires and condition.for_seconds > step:
        times.insert(0, condition.for_seconds - step)
    states = judged(rule.alert, series)
    checks = [Check(at, states[at // step]) for at in times]
    own = [any(severity is rule.severity for severity, _ in check.firing) for check in checks]
    expected = [fires and at == (held - 1) * step for at in times]
    assert own == expected, f"{rule.alert.name}, {name}: {own}"
    return Case(rule.alert, name, series, checks)


def _series(condition: Condition, value: float, held: int, quiet: int) -> dict[Key, list[Segment]]:
    """The value for ``held`` samples, then a healthy one and counters that rest."""
    shape, healthy = Shape(), Shape()
    shape.give(condition.value, value)
    healthy.give(condition.value, _sides(condition)[1])
    found: dict[Key, list[Segment]] = {}
    for key, each in shape.gauges.items():
        found[key] = [Segment(each, 0, held), Segment(healthy.gauges.get(key, each), 0, quiet)]
    for key, each in shape.rates.items():
        rise = each * STEP_SECONDS
        found[key] = [Segment(0, rise, held), Segment(rise * (held - 1), 0, quiet)]
    return found


def _windows(value: Expression) -> Iterator[int]:
    match value:
        case Increase(seconds=seconds):
            yield seconds
        case Sum(of=of) | Quantile(of=of):
            yield from _windows(of)
        case Ratio(part=left, whole=right) | Plus(left=left, right=right):
            yield from _windows(left)
            yield from _windows(right)


def judged(
    alert: Alert, series: Mapping[Key, list[Segment]]
) -> list[frozenset[tuple[Severity, LabelSet]]]:
    """What fires at every step, by the judge in the process."""
    judge = Judge([alert])
    values = {key: list(_expanded(segments)) for key, segments in series.items()}
    states = []
    for place in range(max(map(len, values.values()))):
        now: dict[str, dict[LabelSet, float]] = {}
        for (name, labels), each in values.items():
            if place < len(each) and not math.isnan(each[place]):
                now.setdefault(name, {})[labels] = each[place]
        judge.judge(now, place * STEP_SECONDS)
        firing = (alert for alert in judge.alerts if alert.state == "firing")
        states.append(frozenset((each.rule.severity, each.labels) for each in firing))
    return states


def _expanded(segments: list[Segment]) -> Iterator[float]:
    for start, step, count in segments:
        yield from (start + step * place for place in range(count))
