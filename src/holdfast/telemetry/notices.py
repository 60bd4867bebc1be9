"""What is reported to a sink of alerts, and when. (Pure.)

Changes that come together are reported together, a SEV-1 at once; what still fires is
reported again after an hour; an end is reported if the beginning was due. A silence
keeps an alert from being reported, not from being seen.

Reported is what the sink has taken. Until then it is tried again, with growing pauses
between ``RETRY_SECONDS`` and ``RETRY_SECONDS_MAX``, over restarts too.

A notice has the shape in which Prometheus' Alertmanager calls a webhook (version 4), so
that whatever takes its calls takes ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from msgspec import Struct, structs

from holdfast.bounds import positive
from holdfast.telemetry.alert import Severity
from holdfast.telemetry.expressions import LabelSet

SinkKind = Literal["log", "webhook", "command"]
ORDER = tuple(Severity)
"""From the worst on."""
NOTICE_ALERTS_MAX = 100
"""The most alerts in one notice; ``truncatedAlerts`` counts the others. What is new
among them comes with the next notice.
"""
RETRY_SECONDS = 5.0
"""The pause after the first notice that a sink did not take; it doubles each time."""
RETRY_SECONDS_MAX = 120.0
"""The longest such pause. HoldfastAlertsUndelivered looks back over 5 minutes, so it
fires for as long as a sink fails.
"""
REMEMBERED_MAX = 1000
"""The most alerts of a sink, or of a node, that a restart remembers: the worst."""
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
        if self.url and not _has_host(self.url):
            raise ValueError("the url of a sink needs a host, and a port from 1 to 65535 if any")
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


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


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
    ``explained_by``: the firing alert that it follows from; ``ended``: when it was
    resolved, empty before.
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
    ended: str = ""

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


class Notice(NamedTuple):
    """What a sink gets; ``left_out`` counts the alerts for which there was no room."""

    alerts: Sequence[AlertView]
    left_out: int = 0


class KnownAlert(Struct, frozen=True):
    """An alert that a sink knows or is owed. ``alert``: as it is now, firing or
    resolved; ``accepted``: the severity with which the sink took its beginning, empty
    before.
    """

    alert: AlertView
    accepted: str = ""


class SinkMemory(Struct, frozen=True):
    """What of this survives a restart. ``sent_at``: when the sink last took a notice,
    in seconds since 1970.
    """

    known: Sequence[KnownAlert] = ()
    sent_at: float = 0.0


class Notices:
    """What one sink is owed. At most one notice is under way.

    ``next`` gives a notice; ``on_accepted`` or ``on_refused`` must follow it. A notice
    that was not taken is not kept: the next one says what is so by then, so nothing
    outdated waits and nothing is overtaken. An alert that was due and has ended in the
    meantime is reported as resolved, with both times.
    """

    def __init__(
        self,
        sink: SinkSettings,
        settings: AlertSettings,
        memory: SinkMemory | None = None,
        now: float = 0.0,
        wall_now: float = 0.0,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        """``now``: of a monotonic clock; ``wall_now``: in seconds since 1970."""
        self._sink, self._settings, self._retry_seconds = sink, settings, retry_seconds
        memory = memory or SinkMemory()
        self._known = {each.alert.key: each for each in memory.known}
        self.sent_at = memory.sent_at
        """When it last took a notice, in seconds since 1970; 0 before the first."""
        passed = max(0.0, wall_now - memory.sent_at)
        self._repeat_at = now + settings.repeat_seconds - passed
        self._changed_at: float | None = None
        self._under_way: Notice | None = None
        self._tried = set[tuple[str, LabelSet]]()
        self.failures = 0
        """How many notices in a row it did not take."""
        self.retry_at = 0.0
        """It is not tried again before; of the monotonic clock."""

    @property
    def memory(self) -> SinkMemory:
        worst = sorted(self._known.values(), key=lambda each: by_severity(each.alert))
        return SinkMemory(worst[:REMEMBERED_MAX], self.sent_at)

    @property
    def waiting(self) -> int:
        """How many alerts were due and were not taken, or their end was not."""
        return sum(not e.accepted or e.alert.state == "resolved" for e in self._known.values())

    def next(
        self, firing: Sequence[AlertView], silenced: Collection[str], now: float, at: str
    ) -> Notice | None:
        """What to report now; nothing most of the time. ``firing``: the worst of each
        alert that fires; ``at``: the time of day.
        """
        least = Severity.WARNING if self._sink.kind == "log" else Severity(self._sink.severity)
        fires = {alert.key: alert for alert in firing if by_severity(alert) <= ORDER.index(least)}
        self._refresh(fires, at)
        wanted = [alert for alert in fires.values() if alert.name not in silenced]
        news = [alert for alert in wanted if self._is_news(alert)]
        ended = [each.alert for each in self._known.values() if each.alert.state == "resolved"]
        if not self._is_due(wanted, news, ended, now):
            return None
        for alert in news:
            before = self._known.get(alert.key)
            self._known[alert.key] = KnownAlert(alert, before.accepted if before else "")
        is_urgent = any(a.severity == Severity.SEV1 and a.key not in self._tried for a in news)
        if self._under_way is not None or (now < self.retry_at and not is_urgent):
            return None
        self._under_way = self._chosen(wanted, news, ended)
        self._tried.update(alert.key for alert in self._under_way.alerts)
        return self._under_way

    def on_accepted(self, now: float, wall_now: float) -> None:
        """The sink took the notice."""
        assert self._under_way is not None
        for alert in self._under_way.alerts:
            known = self._known[alert.key].alert
            if alert.state == "firing":
                self._known[alert.key] = KnownAlert(known, alert.severity)
            elif known.state == "resolved":
                del self._known[alert.key]
            else:  # it fires again
                self._known[alert.key] = KnownAlert(known)
        self._tried.clear()
        self._under_way, self._changed_at = None, None
        self.failures, self.retry_at = 0, 0.0
        self.sent_at, self._repeat_at = wall_now, now + self._settings.repeat_seconds

    def on_refused(self, now: float) -> None:
        """The sink did not take it, or nobody knows whether it did."""
        pause = min(RETRY_SECONDS_MAX, self._retry_seconds * 2 ** min(self.failures, 30))
        self._under_way, self.retry_at = None, now + pause
        self.failures += 1

    def on_tested(self) -> None:
        """The sink took a test: what waits need not wait longer."""
        self.retry_at = 0.0

    def _refresh(self, fires: Mapping[tuple[str, LabelSet], AlertView], at: str) -> None:
        """What the sink knows, as it is now."""
        for key, each in self._known.items():
            if key in fires:
                self._known[key] = KnownAlert(fires[key], each.accepted)
            elif each.alert.state == "firing":
                ended = structs.replace(each.alert, state="resolved", ended=at)
                self._known[key] = KnownAlert(ended, each.accepted)

    def _is_news(self, alert: AlertView) -> bool:
        known = self._known.get(alert.key)
        if known is None or not known.accepted:
            return True
        return by_severity(alert) < ORDER.index(Severity(known.accepted))

    def _is_due(
        self,
        wanted: Sequence[AlertView],
        news: Sequence[AlertView],
        ended: Sequence[AlertView],
        now: float,
    ) -> bool:
        if not news and not ended:
            self._changed_at = None
            return bool(wanted) and now >= self._repeat_at
        if self._changed_at is None:
            self._changed_at = now
        if any(alert.severity == Severity.SEV1 for alert in news):
            return True
        return now - self._changed_at >= self._settings.group_seconds

    def _chosen(
        self, wanted: Sequence[AlertView], news: Sequence[AlertView], ended: Sequence[AlertView]
    ) -> Notice:
        """A pager gets the whole picture each time, the log only what it has not yet;
        so does a pager if there is no room for more.
        """
        picture, changes = [*wanted, *ended], [*news, *ended]
        if self._sink.kind == "log" and changes:
            picture = changes
        shown = changes if changes and len(picture) > NOTICE_ALERTS_MAX else picture
        shown = shown[:NOTICE_ALERTS_MAX]
        return Notice(shown, len(picture) - len(shown))


def notice_body(notice: Notice, receiver: str, node_id: str, url: str) -> dict[str, Any]:
    """A notice in Alertmanager's shape."""
    listed = [_listed(alert, node_id) for alert in notice.alerts]
    labels = {"service": "holdfast", "node": node_id}
    return {
        "version": "4",
        "groupKey": f'{{}}:{{node="{node_id}"}}',
        "truncatedAlerts": notice.left_out,
        "status": "firing" if any(each["status"] == "firing" for each in listed) else "resolved",
        "receiver": receiver,
        "groupLabels": labels,
        "commonLabels": labels,
        "commonAnnotations": {},
        "externalURL": url,
        "alerts": listed,
    }


def notice_id(body: Mapping[str, Any], sent_at: float) -> str:
    """The same for the same news to the same sink, however often it is tried, by
    whichever process; ``sent_at``: when the sink last took a notice.
    """
    facts = [body["receiver"], body["groupKey"], sent_at, body["alerts"]]
    return f"alert_{hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()}"


def _listed(alert: AlertView, node_id: str) -> dict[str, Any]:
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
        "endsAt": alert.ended or FIRES_STILL,
        "generatorURL": "",
        "fingerprint": fingerprint.hexdigest(),
    }
