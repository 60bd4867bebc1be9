"""What sinks of alerts are reported, and when."""

from __future__ import annotations

import pytest
from msgspec import structs

from holdfast.settings import Settings, differences
from holdfast.telemetry.notices import (
    NOTICE_ALERTS_MAX,
    AlertSettings,
    AlertView,
    Notices,
    SinkSettings,
    notice_body,
    worst_of_each,
)

HOOK = SinkSettings("webhook", url="http://127.0.0.1:1/")


def view(name: str = "A", severity: str = "SEV-3", **labels: str) -> AlertView:
    at = "2026-01-01T00:00:00.000Z"
    return AlertView(name, severity, "firing", labels, at, 1.0, "It is.", "docs/guides/x.md")


def reported(notices: Notices, firing: list[AlertView], now: float, *silenced: str) -> list[str]:
    return [f"{each.name} {each.state}" for each in notices.next(firing, silenced, now)]


def test_changes_that_come_together_are_told_together_and_once() -> None:
    notices = Notices(HOOK, AlertSettings())
    assert reported(notices, [view("A")], 0) == []
    assert reported(notices, [view("A"), view("B")], 5) == []
    assert reported(notices, [view("A"), view("B")], 10) == ["A firing", "B firing"]
    assert reported(notices, [view("A"), view("B")], 15) == []


def test_sev_1_is_told_at_once() -> None:
    notices = Notices(HOOK, AlertSettings())
    assert reported(notices, [view("A", "SEV-1")], 0) == ["A firing"]
    assert reported(notices, [view("A", "SEV-1"), view("B", "SEV-2")], 5) == []


def test_end_is_told_with_what_still_fires_and_only_if_the_beginning_was() -> None:
    notices = Notices(HOOK, AlertSettings())
    reported(notices, [view("A", "SEV-1"), view("B", "SEV-1")], 0)
    assert reported(notices, [view("B", "SEV-1")], 5) == []
    assert reported(notices, [view("B", "SEV-1")], 15) == ["B firing", "A resolved"]
    assert reported(notices, [], 20) == [] and reported(notices, [], 30) == ["B resolved"]
    assert reported(notices, [view("C")], 40) == [] and reported(notices, [], 45) == []
    assert reported(notices, [], 100) == [], "nobody heard of C"


def test_what_still_fires_is_told_again_after_an_hour() -> None:
    notices = Notices(HOOK, AlertSettings())
    reported(notices, [view("A", "SEV-1")], 0)
    assert reported(notices, [view("A", "SEV-1")], 3595) == []
    assert reported(notices, [view("A", "SEV-1")], 3600) == ["A firing"]
    assert reported(notices, [view("A", "SEV-1")], 3605) == []


def test_warning_that_becomes_a_sev_is_told_again() -> None:
    notices = Notices(SinkSettings("log"), AlertSettings())
    reported(notices, [view("A", "warning")], 0)
    assert reported(notices, [view("A", "warning")], 10) == ["A firing"]
    reported(notices, [view("A", "SEV-3")], 15)
    assert reported(notices, [view("A", "SEV-3")], 25) == ["A firing"]


def test_alert_that_falls_below_what_a_sink_hears_of_has_ended_for_it() -> None:
    notices = Notices(HOOK, AlertSettings())
    reported(notices, [view("A", "SEV-1")], 0)
    reported(notices, [view("A", "warning")], 5)
    assert reported(notices, [view("A", "warning")], 15) == ["A resolved"]


@pytest.mark.parametrize(
    ("least", "expected"),
    [("SEV-1", 1), ("SEV-2", 2), ("SEV-3", 3), ("warning", 4)],
)
def test_sink_hears_its_least_severity_and_worse(least: str, expected: int) -> None:
    sink = SinkSettings("command", argv=("true",), severity=least)
    notices = Notices(sink, AlertSettings())
    all_of_them = [view(each, each) for each in ("SEV-1", "SEV-2", "SEV-3", "warning")]
    assert len(notices.next(all_of_them, (), 0)) == expected


def test_silenced_alert_is_not_told_until_the_silence_ends() -> None:
    notices = Notices(HOOK, AlertSettings())
    assert reported(notices, [view("A", "SEV-1")], 0, "A") == []
    assert reported(notices, [view("A", "SEV-1")], 5) == ["A firing"]
    assert reported(notices, [view("A", "SEV-1")], 4000, "A") == [], "not repeated either"
    reported(notices, [], 4005, "A")
    assert reported(notices, [], 4015, "A") == ["A resolved"], "its end is good news"


def test_next_process_tells_the_end_of_what_the_last_one_told() -> None:
    before = [view("A"), view("B")]
    notices = Notices(HOOK, AlertSettings(), reported=before, settled_at=300)
    assert reported(notices, [view("A")], 5) == [], "B may be pending still"
    assert reported(notices, [view("A")], 100) == []
    reported(notices, [], 105)
    assert reported(notices, [], 115) == ["A resolved"], "this process has seen it"
    reported(notices, [], 300)
    assert reported(notices, [], 310) == ["B resolved"]


def test_worst_of_an_alert_stands_for_it() -> None:
    alerts = [
        view("A", "warning"),
        view("B", "SEV-3"),
        view("A", "SEV-2"),
        view("A", "SEV-3", d="x"),
    ]
    shown = [(each.name, each.severity, each.labels) for each in worst_of_each(alerts)]
    assert shown == [("A", "SEV-2", {}), ("B", "SEV-3", {}), ("A", "SEV-3", {"d": "x"})]


def test_oldest_of_equals_is_shown_first() -> None:
    alerts = [
        structs.replace(view(name), since=since)
        for name, since in (("Consequence", "2026-01-01T00:01"), ("Cause", "2026-01-01T00:00"))
    ]
    assert [each.name for each in worst_of_each(alerts)] == ["Cause", "Consequence"]


def test_alert_that_becomes_worse_keeps_its_fingerprint() -> None:
    def identity(alert: AlertView) -> str:
        body = notice_body([alert], "pager", "node_1", "", "")
        return str(body["alerts"][0]["fingerprint"])

    assert identity(view("A", "warning")) == identity(view("A", "SEV-2"))
    assert identity(view("A", "SEV-2")) != identity(view("A", "SEV-2", dependency="store"))


def test_notice_has_the_shape_of_alertmanager() -> None:
    alerts = [view("A", "SEV-1", dependency="store")]
    body = notice_body(alerts, "pager", "node_1", "http://n", "2026-01-01T01:00:00.000Z")
    assert set(body) == {
        *("version", "groupKey", "truncatedAlerts", "status", "receiver", "groupLabels"),
        *("commonLabels", "commonAnnotations", "externalURL", "alerts"),
    }
    (one,) = body["alerts"]
    assert (body["version"], body["status"], one["status"]) == ("4", "firing", "firing")
    assert one["labels"] == {
        "alertname": "A", "severity": "SEV-1", "dependency": "store", "service": "holdfast",
        "node": "node_1",
    }  # fmt: skip
    assert one["annotations"]["runbook"] == "docs/guides/x.md"
    assert (one["endsAt"], len(one["fingerprint"])) == ("0001-01-01T00:00:00Z", 16)
    many = notice_body([view(f"A{n}") for n in range(NOTICE_ALERTS_MAX + 5)], "p", "n", "", "")
    assert (len(many["alerts"]), many["truncatedAlerts"]) == (NOTICE_ALERTS_MAX, 5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kind": "webhook"}, "a webhook has a url"),
        ({"kind": "webhook", "url": "ftp://x"}, "http://"),
        ({"kind": "command"}, "a command has argv"),
        ({"kind": "log", "argv": ("x",)}, "argv"),
        ({"kind": "log", "secret_file": "x"}, "only a webhook is signed"),
    ],
)
def test_sink_that_makes_no_sense_is_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SinkSettings(**wrong)  # type: ignore[arg-type]


def test_two_sinks_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="a name of its own"):
        AlertSettings(sinks=(HOOK, HOOK))


def test_url_of_a_sink_is_shown_without_its_path() -> None:
    secret = SinkSettings("webhook", url="https://hooks.example.com/T0/B1/secret")
    settings = Settings(alerts=AlertSettings((secret, SinkSettings())))
    (shown,) = [value for path, value, _ in differences(settings) if path == "alerts.sinks"]
    assert "hooks.example.com" in shown and "B1" not in shown
