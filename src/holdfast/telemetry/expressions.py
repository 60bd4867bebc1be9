"""Expressions over metrics, as values. (Pure.)

The alerts and the dashboard are made of them. ``promql`` prints one for Prometheus;
``telemetry.judge`` evaluates one in the process. Nothing parses PromQL. The meaning is
PromQL's: an expression has a value for every set of labels, two sides of a ratio are
joined where their labels are equal, 0/0 is no number and compares false.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

PREFIX = "holdfast_"
Match = tuple[str, Literal["=", "!=", "=~", "!~"], str]
"""A label, how its value is compared, and with what."""
LabelSet = tuple[tuple[str, str], ...]
"""Label names and values, sorted."""


@dataclass(frozen=True, slots=True)
class Series:
    """The last value of each series of a metric whose labels match."""

    name: str
    """As in ``/metrics``, with ``_total`` or ``_bucket``, without ``holdfast_``."""
    matches: tuple[Match, ...] = ()

    def accepts(self, labels: LabelSet) -> bool:
        values = dict(labels)
        return all(_accepts(values.get(label, ""), how, what) for label, how, what in self.matches)


@dataclass(frozen=True, slots=True)
class Increase:
    """How much each counter rose in the last ``seconds``, extrapolated to all of
    them.
    """

    of: Series
    seconds: int


@dataclass(frozen=True, slots=True)
class Sum:
    """The sum over the values of these labels."""

    of: Series | Increase
    without: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ratio:
    part: Expression
    whole: Expression


@dataclass(frozen=True, slots=True)
class Plus:
    left: Expression
    right: Expression


@dataclass(frozen=True, slots=True)
class Quantile:
    """A quantile of a histogram without labels, over its ``_bucket`` series."""

    quantile: float
    of: Increase


@dataclass(frozen=True, slots=True)
class Absent:
    """1 for every metric without a series, with its name as the label ``metric``."""

    series: tuple[Series, ...]


Expression = Series | Increase | Sum | Ratio | Plus | Quantile | Absent


@dataclass(frozen=True, slots=True)
class Condition:
    """The value of an expression compared with a number, and how long it must hold."""

    value: Expression
    compare: Literal[">", ">=", "<", "=="]
    threshold: float
    for_seconds: int = 0

    def holds(self, value: float) -> bool:
        match self.compare:
            case ">":
                return value > self.threshold
            case ">=":
                return value >= self.threshold
            case "<":
                return value < self.threshold
            case "==":
                return value == self.threshold


def _accepts(value: str, how: str, what: str) -> bool:
    if how in ("=", "!="):
        return (value == what) == (how == "=")
    return (re.fullmatch(what, value) is not None) == (how == "=~")


def promql(value: Expression | Condition) -> str:
    """The text of an expression for Prometheus."""
    match value:
        case Condition(value=inner, compare=compare, threshold=threshold):
            text = _operand(inner) if isinstance(inner, Absent) else promql(inner)
            return f"{text} {compare} {threshold:g}"
        case Series(name=name, matches=matches):
            inside = ",".join(f'{label}{how}"{what}"' for label, how, what in matches)
            return f"{PREFIX}{name}{{{inside}}}" if inside else f"{PREFIX}{name}"
        case Increase(of=of, seconds=seconds):
            return f"increase({promql(of)}[{duration(seconds)}])"
        case Sum(of=of, without=without):
            return f"sum without ({', '.join(without)}) ({promql(of)})"
        case Ratio(part=part, whole=whole):
            return f"{_operand(part)} / {_operand(whole)}"
        case Plus(left=left, right=right):
            return f"{_operand(left)} + {_operand(right)}"
        case Quantile(quantile=quantile, of=of):
            return f"histogram_quantile({quantile:g}, {promql(of)})"
        case Absent(series=series):
            return "\nor ".join(_absent(each) for each in series)


def series_of(value: Expression) -> tuple[Series, ...]:
    """Every series that an expression reads."""
    match value:
        case Series():
            return (value,)
        case Increase(of=of) | Sum(of=of) | Quantile(of=of):
            return series_of(of)
        case Ratio(part=left, whole=right) | Plus(left=left, right=right):
            return (*series_of(left), *series_of(right))
        case Absent(series=series):
            return series


def duration(seconds: int) -> str:
    """As Prometheus writes it: 90 s are 1m30s."""
    parts = ((seconds // 3600, "h"), (seconds % 3600 // 60, "m"), (seconds % 60, "s"))
    return "".join(f"{count}{unit}" for count, unit in parts if count) or "0s"


def _operand(value: Expression) -> str:
    return f"({promql(value)})" if isinstance(value, Ratio | Plus | Absent) else promql(value)


def _absent(series: Series) -> str:
    """The name as a label: ``absent`` itself gives none."""
    return f'label_replace(absent({promql(series)}), "metric", "{PREFIX}{series.name}", "", "")'
