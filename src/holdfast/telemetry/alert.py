"""What an alert is, and the short forms in which they are written. (Pure.)"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple

from holdfast.telemetry.expressions import (
    Condition,
    Expression,
    Increase,
    Match,
    Quantile,
    Series,
    Sum,
    series_of,
)

MINUTE, FIVE_MINUTES, HOUR = 60, 300, 3600


class Severity(StrEnum):
    SEV1 = "SEV-1"
    SEV2 = "SEV-2"
    SEV3 = "SEV-3"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Alert:
    """``means``: one sentence for whoever is called. ``runbook``: a page under
    docs/guides. ``where``: the series are there only in such a deployment; empty: in
    every one, and that one is missing is itself an alert. ``explains``: the alerts that
    follow from this one (``telemetry.causes``). ``stays_with``: the alert that shows
    its cause; on a node it goes on for as long as that one does.
    """

    name: str
    severity: Severity
    when: Condition
    means: str
    runbook: str
    rows: tuple[str, ...] = ()
    warning: Condition | None = None
    where: str = ""
    explains: tuple[str, ...] = ()
    stays_with: str = ""


class AlertRule(NamedTuple):
    """A condition of an alert and its severity: what is evaluated."""

    alert: Alert
    severity: Severity
    condition: Condition


def rules(alerts: Iterable[Alert]) -> Iterator[AlertRule]:
    """The rules of the alerts; one with a warning has two."""
    for alert in alerts:
        yield AlertRule(alert, alert.severity, alert.when)
        if alert.warning is not None:
            yield AlertRule(alert, Severity.WARNING, alert.warning)


def series(name: str, **labels: str) -> Series:
    matches: list[Match] = [(label, "=", value) for label, value in labels.items()]
    return Series(name, tuple(matches))


def rise(name: str, seconds: int, **labels: str) -> Increase:
    return Increase(series(f"{name}_total", **labels), seconds)


def risen(
    name: str, seconds: int, without: tuple[str, ...], matches: tuple[Match, ...] = ()
) -> Sum:
    """The rise of a counter over all values of its labels."""
    return Sum(Increase(Series(f"{name}_total", matches), seconds), without)


def p99(name: str, seconds: int) -> Quantile:
    return Quantile(0.99, Increase(Series(f"{name}_bucket"), seconds))


def above(value: Expression, threshold: float, for_seconds: int = 0) -> Condition:
    return Condition(value, ">", threshold, for_seconds)


def at_least(value: Expression, threshold: float, for_seconds: int = 0) -> Condition:
    return Condition(value, ">=", threshold, for_seconds)


def below(value: Expression, threshold: float, for_seconds: int = 0) -> Condition:
    return Condition(value, "<", threshold, for_seconds)


def equals(value: Expression, expected: Literal[0, 1], for_seconds: int = 0) -> Condition:
    return Condition(value, "==", expected, for_seconds)


def expected_series(alerts: Iterable[Alert]) -> tuple[Series, ...]:
    """Every series that must be there, once."""
    found = [
        each
        for rule in rules(alerts)
        if not rule.alert.where
        for each in series_of(rule.condition.value)
    ]
    return tuple(dict.fromkeys(found))
