"""Puts alerts in the order in which to act: a cause before its effects. (Pure.)

An alert names those that it explains. While it fires with its own severity, and not as
a warning, they are listed under it, however severe they are: a full disk stops the
store, and to look at the store first loses time. An incident takes the place of its
worst alert.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from holdfast.telemetry.alerts import ALERTS
from holdfast.telemetry.notices import AlertView

_SEVERITY = {alert.name: str(alert.severity) for alert in ALERTS}
_CAUSES = {
    alert.name: tuple(cause.name for cause in ALERTS if alert.name in cause.explains)
    for alert in ALERTS
}


def causes_first(alerts: Sequence[AlertView]) -> list[AlertView]:
    """``alerts``: the worst of each, in the order of ``notices.worst_of_each``."""
    causes = {
        alert.name
        for alert in alerts
        if alert.state == "firing" and alert.severity == _SEVERITY.get(alert.name)
    }
    explained = [replace(each, explained_by=_root(each.name, causes)) for each in alerts]
    place: dict[str, int] = {}
    for each in explained:
        place.setdefault(each.explained_by or each.name, len(place))
    return sorted(
        explained,
        key=lambda each: (
            each.state != "firing",
            place[each.explained_by or each.name],
            bool(each.explained_by),
        ),
    )


def _root(name: str, causes: set[str]) -> str:
    """The firing alert from which this one follows in the end; empty: none."""
    found = ""
    while cause := next((each for each in _CAUSES.get(name, ()) if each in causes), ""):
        found = name = cause
    return found
