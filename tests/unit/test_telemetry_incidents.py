"""What fires on a node goes on over a restart until it can be judged again."""

from __future__ import annotations

from msgspec import structs

from holdfast.telemetry.alert import Alert, Severity, above, rise, series
from holdfast.telemetry.incidents import Incidents
from holdfast.telemetry.notices import REMEMBERED_MAX, AlertView

GAUGE = Alert("Gauge", Severity.SEV2, above(series("g"), 0), "", "")
RATE = Alert("Rate", Severity.SEV3, above(rise("r", 300), 0, 60), "", "")
EVENT = Alert("Event", Severity.SEV1, above(rise("e", 300), 0), "", "", stays_with="Gauge")
ALERTS = (GAUGE, RATE, EVENT)
BEFORE, NOW = "2026-01-01T00:00:00.000Z", "2026-01-01T00:10:00.000Z"
SETTLED = 1030.0


def view(name: str, state: str = "firing", since: str = NOW, severity: str = "") -> AlertView:
    found = severity or next(str(each.severity) for each in ALERTS if each.name == name)
    return AlertView(name, found, state, {}, since, 1.0, "", "")  # type: ignore[arg-type]


def restarted(*names: str) -> Incidents:
    """At 1000, of a process in which these fired."""
    return Incidents(ALERTS, [view(name, since=BEFORE) for name in names], 1000.0, SETTLED)


def shown(incidents: Incidents, now: float, *judged: AlertView) -> list[tuple[str, str, str]]:
    found = incidents.update(judged, now)
    return sorted((each.name, each.state, each.since) for each in found)


def test_what_is_judged_is_shown() -> None:
    incidents = restarted()
    assert shown(incidents, 1000, view("Gauge"), view("Rate", "pending")) == [
        ("Gauge", "firing", NOW),
        ("Rate", "pending", NOW),
    ]
    assert [each.name for each in incidents.memory] == ["Gauge"], "only that can be forgotten"
    assert shown(incidents, 1005) == []


def test_gauge_goes_on_until_it_was_set_and_then_has_ended() -> None:
    incidents = restarted("Gauge")
    assert shown(incidents, 1000) == shown(incidents, 1029) == [("Gauge", "firing", BEFORE)]
    assert shown(incidents, 1030) == []


def test_incident_that_still_holds_is_the_same_one() -> None:
    incidents = restarted("Gauge", "Rate")
    judged = view("Gauge"), view("Rate", "pending")
    same = [("Gauge", "firing", BEFORE), ("Rate", "firing", BEFORE)]
    assert shown(incidents, 1000, *judged) == shown(incidents, 2000, *judged) == same
    assert shown(incidents, 2005) == [], "both have been judged"


def test_condition_that_was_judged_has_ended_when_it_does_not_hold() -> None:
    incidents = restarted("Rate")
    shown(incidents, 1000, view("Rate"))
    assert shown(incidents, 1005) == []


def test_window_goes_on_until_it_is_full() -> None:
    incidents = restarted("Rate")
    assert shown(incidents, 1299) == [("Rate", "firing", BEFORE)]
    assert shown(incidents, 1300) == []


def test_event_goes_on_for_as_long_as_its_cause() -> None:
    incidents = restarted()
    both = view("Event"), view("Gauge")
    shown(incidents, 1000, *both)
    assert shown(incidents, 1300, view("Gauge")) == [
        ("Event", "firing", NOW),
        ("Gauge", "firing", NOW),
    ]
    assert shown(incidents, 9000, view("Gauge"))[0] == ("Event", "firing", NOW)
    assert shown(incidents, 9005) == [], "mended"
    assert shown(incidents, 9010, view("Gauge")) == [("Gauge", "firing", NOW)], "something new"


def test_event_that_is_judged_again_has_its_new_value() -> None:
    incidents = restarted("Event", "Gauge")
    later = structs.replace(view("Event"), value=7.0)
    found = incidents.update([later, view("Gauge")], 1000)
    assert [(each.value, each.since) for each in found if each.name == "Event"] == [(7.0, BEFORE)]


def test_event_of_the_process_before_ends_when_its_cause_is_mended() -> None:
    incidents = restarted("Event", "Gauge")
    assert len(shown(incidents, 1029)) == 2
    assert len(shown(incidents, 1040, view("Gauge"))) == 2
    assert shown(incidents, 1045) == []
    held = shown(restarted("Event"), 1030, view("Gauge", "pending"))
    assert [name for name, _, _ in held] == ["Event", "Gauge"], "its cause is there again"
    assert shown(restarted("Event"), 1030) == [], "it need not wait for a window of events"


def test_alert_that_this_release_does_not_have_is_forgotten() -> None:
    old = [view("Gone", severity="SEV-2"), structs.replace(view("Gauge"), severity="warning")]
    assert shown(Incidents(ALERTS, old, 0, 30), 0) == []


def test_memory_is_bounded_and_keeps_the_worst() -> None:
    many = [structs.replace(view("Rate"), labels={"n": str(n)}) for n in range(REMEMBERED_MAX)]
    incidents = restarted()
    incidents.update([*many, view("Event")], 1000)
    assert len(incidents.memory) == REMEMBERED_MAX and incidents.memory[0].name == "Event"
