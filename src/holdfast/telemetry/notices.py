"""What is reported to a sink of alerts, and when. (Pure.)

Changes that come together are reported together, a SEV-1 at once; what still fires is
reported again after an hour; an end is reported if the beginning was. A silence keeps
an alert from being reported, not from being seen.

A notice has the shape in which Prometheus' Alertmanager calls a webhook (version 4), so
that whatever takes its calls takes ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from msgspec import Struct

from holdfast.bounds import positive
from holdfast.telemetry.alert import Severity
from holdfast.telemetry.expressions import LabelSet

SinkKind = Literal["log", "webhook", "command"]
ORDER = tuple(Severity)
"""From the worst on."""
NOTICE_ALERTS_MAX = 100
"""The most alerts in one notice; ``truncatedAlerts`` counts the others."""
FIRES_STILL = "0001-01-01T00:00:00Z"
"""The end of an alert that has none yet, as Alertmanager writes it."""


@dataclass(frozen=True, slots=True)
class SinkSettings:
    """Where alerts go."""

    kind: SinkKind = "log"
    """``webhook`` posts JSON in the shape of Alertmanager, ``command`` gives the same
    to a program, ``log`` writes a line.
    """
    name: str = ""
    """What status and metrics call it. Left empty: its kind."""
    url: str = ""
    """Of a webhook. It may be on a private address."""
    secret_file: str = ""
    """A file with the secret (``whsec_…``) with which a webhook's calls are signed, as
    those of endpoints are. Left empty: not signed.
    """
    argv: tuple[str, ...] = ()
    """The program of a command and its arguments; no shell. It gets JSON on stdin."""
    severity: Literal["SEV-1", "SEV-2", "SEV-3", "warning"] = "SEV-3"
    """The least severity that is reported. The log has them all."""

    def __post_init__(self) -> None:
        if (self.kind == "webhook") != bool(self.url):
            raise ValueError("a webhook has a url, and no other sink of alerts does")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError("the url of a sink must begin with http:// or https://")
        if (self.kind == "command") != bool(self.argv):
            raise ValueError("a command has argv, and no other sink of alerts does")
        if self.secret_file and self.kind != "webhook":
            raise ValueError("only a webhook is signed: secret_file is of no use here")

    @property
    def title(self) -> str:
        return self.name or self.kind

    @property
    def shown(self) -> SinkSettings:
        """Safe to show: the path of a pager's URL is often its only secret."""
        scheme, _, rest = self.url.partition("://")
        return replace(self, url=f"{scheme}://{rest.partition('/')[0]}/…") if rest else self


@dataclass(frozen=True, slots=True)
class AlertSettings:
    """How alerts are judged and reported."""

    sinks: tuple[SinkSettings, ...] = ()
    """Where they go. Left empty: the log. ``holdfast status`` has them in any case."""
    repeat_seconds: float = 3600.0
    """An alert that still fires is reported again after this time."""
    group_seconds: float = 10.0
    """How long changes wait for others to be reported with; a SEV-1 does not wait."""
    webhook_seconds: float = 10.0
    """How long a webhook may take to answer; then the call failed."""
    command_seconds: float = 30.0
    """How long a command may run; then it is killed."""

    def __post_init__(self) -> None:
        positive(self, "repeat_seconds", "group_seconds", "webhook_seconds", "command_seconds")
        titles = [sink.title for sink in self.chosen_sinks]
        if len(set(titles)) < len(titles):
            raise ValueError("alerts.sinks: each needs a name of its own")

    @property
    def chosen_sinks(self) -> tuple[SinkSettings, ...]:
        return self.sinks or (SinkSettings(),)


class AlertView(Struct, frozen=True):
    """An alert as operators see it. ``value``: of its expression, as last judged.
    ``explained_by``: the firing alert that it follows from.
    """

    name: str
    severity: str
    state: Literal["pending", "firing", "resolved"]
    labels: Mapping[str, str]
    since: str
    value: float | None
    means: str
    runbook: str
    silenced_until: str = ""
    explained_by: str = ""

    @property
    def key(self) -> tuple[str, LabelSet]:
        """One alert, whatever its severity."""
        return self.name, tuple(sorted(self.labels.items()))


class Silence(Struct, frozen=True):
    """An alert that is not reported until then."""

    alert: str
    until: str
    reason: str
    by: str


def by_severity(alert: AlertView) -> int:
    return ORDER.index(Severity(alert.severity))


def worst_of_each(alerts: Iterable[AlertView]) -> list[AlertView]:
    """Firing before pending, the worst first, and of these the oldest. No warning of
    what fires already.
    """
    found: dict[tuple[str, LabelSet], AlertView] = {}
    for alert in sorted(alerts, key=lambda a: (a.state != "firing", by_severity(a), a.since)):
        found.setdefault(alert.key, alert)
    return list(found.values())


class Notices:
    """What one sink knows. ``reported``: by the process before this one; such an alert
    may be pending here still, so its end is not reported before ``settled_at``.
    """

    def __init__(
        self,
        sink: SinkSettings,
        settings: AlertSettings,
        reported: Collection[AlertView] = (),
        settled_at: float = 0.0,
    ) -> None:
        self._sink, self._settings, self._settled_at = sink, settings, settled_at
        self._reported = {alert.key: alert for alert in reported}
        self._seen = set[tuple[str, LabelSet]]()
        self._changed_at: float | None = None
        self._sent_at = 0.0

    @property
    def reported(self) -> list[AlertView]:
        """The alerts whose beginning was reported, and whose end was not."""
        return list(self._reported.values())

    def next(
        self, firing: Sequence[AlertView], silenced: Collection[str], now: float
    ) -> list[AlertView]:
        """What to report now; nothing most of the time. ``firing``: the worst of each
        alert that fires, ``now``: of a monotonic clock.
        """
        least = Severity.WARNING if self._sink.kind == "log" else Severity(self._sink.severity)
        fires = {alert.key: alert for alert in firing if by_severity(alert) <= ORDER.index(least)}
        self._seen |= fires.keys()
        wanted = {key: alert for key, alert in fires.items() if alert.name not in silenced}
        ended = [
            alert
            for key, alert in self._reported.items()
            if key not in fires and (key in self._seen or now >= self._settled_at)
        ]
        news = [
            alert
            for key, alert in wanted.items()
            if key not in self._reported or by_severity(alert) < by_severity(self._reported[key])
        ]
        if not news and not ended:
            self._changed_at = None
            if not wanted or now - self._sent_at < self._settings.repeat_seconds:
                return []
        elif self._changed_at is None:
            self._changed_at = now
        if not self._is_due(news, now):
            return []
        self._changed_at, self._sent_at = None, now
        for alert in ended:
            del self._reported[alert.key]
        self._reported.update(wanted)
        self._seen &= fires.keys()
        # a pager gets the whole picture each time, the log only what it has not yet
        is_log_with_news = self._sink.kind == "log" and bool(news or ended)
        shown = news if is_log_with_news else wanted.values()
        return [*shown, *(_ended(alert) for alert in ended)]

    def _is_due(self, news: Sequence[AlertView], now: float) -> bool:
        if self._changed_at is None or any(alert.severity == Severity.SEV1 for alert in news):
            return True
        return now - self._changed_at >= self._settings.group_seconds


def _ended(alert: AlertView) -> AlertView:
    return AlertView(
        alert.name, alert.severity, "resolved", alert.labels, alert.since, alert.value,
        alert.means, alert.runbook,
    )  # fmt: skip


def notice_body(
    alerts: Sequence[AlertView], receiver: str, node_id: str, url: str, at: str
) -> dict[str, Any]:
    """A notice in Alertmanager's shape; ``at``: now, the end of what is resolved."""
    shown = alerts[:NOTICE_ALERTS_MAX]
    listed = [_listed(alert, node_id, at) for alert in shown]
    labels = {"service": "holdfast", "node": node_id}
    return {
        "version": "4",
        "groupKey": f'{{}}:{{node="{node_id}"}}',
        "truncatedAlerts": len(alerts) - len(shown),
        "status": "firing" if any(each["status"] == "firing" for each in listed) else "resolved",
        "receiver": receiver,
        "groupLabels": labels,
        "commonLabels": labels,
        "commonAnnotations": {},
        "externalURL": url,
        "alerts": listed,
    }


def _listed(alert: AlertView, node_id: str, at: str) -> dict[str, Any]:
    identity = {
        **alert.labels,
        "alertname": alert.name,
        "service": "holdfast",
        "node": node_id,
    }
    labels = {**identity, "severity": alert.severity}
    # Not of the severity: a warning that becomes a SEV is one incident, with one end.
    notes = {"summary": alert.means, "runbook": alert.runbook}
    if alert.explained_by:
        notes["explained_by"] = alert.explained_by
    fingerprint = hashlib.blake2b(repr(sorted(identity.items())).encode(), digest_size=8)
    return {
        "status": "resolved" if alert.state == "resolved" else "firing",
        "labels": labels,
        "annotations": notes,
        "startsAt": alert.since,
        "endsAt": at if alert.state == "resolved" else FIRES_STILL,
        "generatorURL": "",
        "fingerprint": fingerprint.hexdigest(),
    }
