"""Which firing alert explains which: the cause is shown first, its effects under it."""

from __future__ import annotations

import pytest

from holdfast.telemetry.alert import Alert, Severity
from holdfast.telemetry.alerts import ALERTS
from holdfast.telemetry.causes import causes_first
from holdfast.telemetry.notices import AlertView, Notice, notice_body, worst_of_each

BY_NAME = {alert.name: alert for alert in ALERTS}


def view(name: str, severity: str = "", state: str = "firing", since: int = 0) -> AlertView:
    alert = BY_NAME[name]
    at = f"2026-01-01T00:00:{since:02}.000Z"
    chosen = severity or str(alert.severity)
    return AlertView(name, chosen, state, {}, at, 1.0, alert.means, alert.runbook)  # type: ignore[arg-type]


def shown(*alerts: AlertView) -> list[tuple[str, str]]:
    return [(each.name, each.explained_by) for each in causes_first(worst_of_each(alerts))]


def test_full_disk_is_shown_before_the_store_that_fails_by_it() -> None:
    assert shown(
        view("HoldfastStoreDown"), view("HoldfastBreakerOpen"), view("HoldfastDiskFull", since=9)
    ) == [
        ("HoldfastDiskFull", ""),
        ("HoldfastStoreDown", "HoldfastDiskFull"),
        ("HoldfastBreakerOpen", "HoldfastDiskFull"),
    ]


def test_stopped_receiver_is_shown_before_the_jobs_that_wait_for_it() -> None:
    assert shown(view("HoldfastJobsOld"), view("HoldfastWebhookFailing", since=5)) == [
        ("HoldfastWebhookFailing", ""),
        ("HoldfastJobsOld", "HoldfastWebhookFailing"),
    ]


def test_incident_takes_the_place_of_its_worst_alert() -> None:
    alerts = [
        view("HoldfastCounterCorruption", since=7),
        view("HoldfastEventLogDown"),
        view("HoldfastStoreDown", since=8),
        view("HoldfastDiskFull", since=9),
    ]
    assert [name for name, _ in shown(*alerts)] == [
        *("HoldfastCounterCorruption", "HoldfastDiskFull", "HoldfastStoreDown"),
        "HoldfastEventLogDown",
    ]


def test_disk_that_is_only_filling_explains_nothing() -> None:
    alerts = (view("HoldfastDiskFull", "warning"), view("HoldfastStoreDown"))
    assert shown(*alerts) == [("HoldfastStoreDown", ""), ("HoldfastDiskFull", "")]


def test_cause_that_is_only_pending_explains_nothing() -> None:
    alerts = (view("HoldfastWebhookFailing", state="pending"), view("HoldfastJobsOld"))
    assert shown(*alerts) == [("HoldfastJobsOld", ""), ("HoldfastWebhookFailing", "")]


def test_pending_alert_comes_last_and_has_its_cause_too() -> None:
    alerts = (
        view("HoldfastWebhookFailing"),
        view("HoldfastJobsOld", state="pending"),
        view("HoldfastDefect", since=5),
    )
    assert shown(*alerts) == [
        ("HoldfastWebhookFailing", ""),
        ("HoldfastDefect", ""),
        ("HoldfastJobsOld", "HoldfastWebhookFailing"),
    ]


def test_alert_without_its_cause_stands_alone() -> None:
    assert shown(view("HoldfastStoreDown")) == [("HoldfastStoreDown", "")]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_alerts_that_one_explains_exist_and_do_not_explain_it(alert: Alert) -> None:
    found, next_ones = set[str](), list(alert.explains)
    while next_ones:
        name = next_ones.pop()
        assert name in BY_NAME
        if name not in found:
            found.add(name)
            next_ones += BY_NAME[name].explains
    assert alert.name not in found
    assert not alert.explains or alert.severity is not Severity.WARNING


def test_notice_names_the_cause() -> None:
    alerts = causes_first([view("HoldfastStoreDown"), view("HoldfastDiskFull")])
    disk, store = notice_body(Notice(alerts), "pager", "n", "http://n")["alerts"]
    assert disk["annotations"].keys() == {"summary", "runbook"}
    assert store["annotations"]["explained_by"] == "HoldfastDiskFull"
