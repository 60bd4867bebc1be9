"""What fires on a node, over restarts. (Pure.)

A process begins with empty windows and gauges that nobody has set, so its judge cannot
know at once what is still so. An alert that fired when the process before this one
stopped goes on as the same incident, until this one can judge it: its gauges are set,
or its window is full. If its condition holds it never ended; if not, it has ended now.

An alert of an event says nothing about the repair. With ``Alert.stays_with`` it goes on
for as long as another alert does, which shows its cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import structs

from holdfast.telemetry.alert import Alert, rules
from holdfast.telemetry.expressions import LabelSet
from holdfast.telemetry.judge import window_seconds
from holdfast.telemetry.notices import REMEMBERED_MAX, AlertView, by_severity

_RuleKey = tuple[str, str, LabelSet]
"""Name, severity and labels: what is judged."""


class Incidents:
    """``remembered``: what fired when the process before this one stopped;
    ``settled_at``: when every gauge has been set since then.
    """

    def __init__(
        self,
        alerts: Iterable[Alert],
        remembered: Iterable[AlertView],
        now: float,
        settled_at: float,
    ) -> None:
        alerts = tuple(alerts)
        self._stays_with = {each.name: each.stays_with for each in alerts if each.stays_with}
        settled = {
            (rule.alert.name, str(rule.severity)): settled_at
            if rule.alert.stays_with
            else max(settled_at, now + window_seconds(rule.condition.value))
            for rule in rules(alerts)
        }
        self._firing = {
            _key(alert): alert for alert in remembered if (alert.name, alert.severity) in settled
        }
        self._settled_at = {key: settled[key[0], key[1]] for key in self._firing}

    @property
    def memory(self) -> Sequence[AlertView]:
        """What the next process must know."""
        return sorted(self._firing.values(), key=by_severity)[:REMEMBERED_MAX]

    def update(self, judged: Iterable[AlertView], now: float) -> list[AlertView]:
        """What is pending or firing, of what was judged now and what goes on."""
        seen = {_key(alert): alert for alert in judged}
        before, self._firing = self._firing, {}
        for key, alert in seen.items():
            if alert.state == "firing":
                self._settled_at.pop(key, None)
            if alert.state == "firing" or key in before:
                since = before.get(key, alert).since
                self._firing[key] = structs.replace(alert, state="firing", since=since)
        pending = [alert for key, alert in seen.items() if key not in self._firing]
        for key, alert in before.items():
            if key not in seen and now < self._settled_at.get(key, now):
                self._firing[key] = alert
        active = {alert.name for alert in (*pending, *self._firing.values())}
        for key, alert in before.items():
            if self._stays_with.get(alert.name) in active:
                self._firing.setdefault(key, alert)
        return [*self._firing.values(), *pending]


def _key(alert: AlertView) -> _RuleKey:
    return (alert.name, alert.severity, tuple(sorted(alert.labels.items())))
