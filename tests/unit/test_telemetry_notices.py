"""What sinks of alerts are reported, and when."""

from __future__ import annotations

from itertools import pairwise

import pytest
from msgspec import structs
from msgspec.json import decode, encode

from holdfast.settings import Settings, differences
from holdfast.telemetry.notices import (
    REMEMBERED_MAX,
    RETRY_SECONDS,
    RETRY_SECONDS_MAX,
    AlertSettings,
    AlertView,
    Notice,
    Notices,
    SinkMemory,
    SinkSettings,
    notice_body,
    notice_id,
    worst_of_each,
)

HOOK = SinkSettings("webhook", url="http://127.0.0.1:1/")
AT = "2026-01-01T00:00:00.000Z"


def view(name: str = "A", severity: str = "SEV-3", **labels: str) -> AlertView:
    return AlertView(name, severity, "firing", labels, AT, 1.0, "It is.", "docs/guides/x.md")


def due(notices: Notices, firing: list[AlertView], now: float, *silenced: str) -> list[str]:
    """What the sink gets now."""
    notice = notices.next(firing, silenced, now, f"at {now:g}")
    return [f"{each.name} {each.state}" for each in notice.alerts] if notice else []


def reported(notices: Notices, firing: list[AlertView], now: float, *silenced: str) -> list[str]:
    """The same, and the sink takes it."""
    if found := due(notices, firing, now, *silenced):
        notices.on_accepted(now, now)
    return found


def refused(notices: Notices, firing: list[AlertView], now: float) -> list[str]:
    """The same, and the sink does not."""
    if found := due(notices, firing, now):
        notices.on_refused(now)
    return found


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
    assert reported(notices, [], 20) == [] and notices.waiting == 1, "an end waits, too"
    assert reported(notices, [], 30) == ["B resolved"]
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


def test_alert_that_becomes_worse_on_the_way_is_told_again() -> None:
    notices = Notices(HOOK, AlertSettings())
    due(notices, [view("A", "SEV-3")], 0)
    assert due(notices, [view("A", "SEV-3")], 10) == ["A firing"]
    assert due(notices, [view("A", "SEV-2")], 15) == [], "one is under way"
    notices.on_accepted(16, 16)
    assert due(notices, [view("A", "SEV-2")], 20) == []
    assert reported(notices, [view("A", "SEV-2")], 30) == ["A firing"]


def test_alert_that_was_worse_while_a_sink_failed_is_not_told_again() -> None:
    notices = Notices(HOOK, AlertSettings())
    reported(notices, [view("A", "SEV-2")], 0)
    assert reported(notices, [view("A", "SEV-2")], 10) == ["A firing"]
    assert refused(notices, [view("A", "SEV-1")], 15) == ["A firing"]
    assert notices.waiting == 0, "the sink knows that it fires"
    assert due(notices, [view("A", "SEV-2")], 300) == due(notices, [view("A", "SEV-2")], 310) == []


def test_change_that_came_and_went_does_not_hasten_the_next() -> None:
    notices = Notices(HOOK, AlertSettings())
    assert due(notices, [view("A")], 5) == [] and due(notices, [], 10) == []
    assert notices.memory.known == []
    assert due(notices, [view("B")], 100) == []
    assert due(notices, [view("B")], 110) == ["B firing"]


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
    assert len(due(notices, all_of_them, 0)) == expected


def test_silenced_alert_is_not_told_until_the_silence_ends() -> None:
    notices = Notices(HOOK, AlertSettings())
    assert reported(notices, [view("A", "SEV-1")], 0, "A") == []
    assert reported(notices, [view("A", "SEV-1")], 5) == ["A firing"]
    assert reported(notices, [view("A", "SEV-1")], 4000, "A") == [], "not repeated either"
    reported(notices, [], 4005, "A")
    assert reported(notices, [], 4015, "A") == ["A resolved"], "its end is good news"


def test_sink_that_takes_nothing_is_tried_again_with_bounded_pauses() -> None:
    notices = Notices(HOOK, AlertSettings())
    tries = [now for now in range(0, 1000, 5) if refused(notices, [view("A", "SEV-1")], now)]
    pauses = [after - before for before, after in pairwise(tries)]
    assert pauses[:6] == [RETRY_SECONDS, 10, 20, 40, 80, RETRY_SECONDS_MAX]
    assert set(pauses[5:]) == {RETRY_SECONDS_MAX}
    for now in range(10_000, 200_000, 130):
        assert refused(notices, [view("A", "SEV-1")], now), "for days"
    assert notices.retry_at == now + RETRY_SECONDS_MAX
    notices.failures = len(tries)
    assert (notices.failures, notices.waiting, notices.sent_at) == (len(tries), 1, 0)
    assert reported(notices, [view("A", "SEV-1")], 300_000) == ["A firing"]
    assert (notices.failures, notices.waiting, notices.sent_at) == (0, 0, 300_000)


def test_end_of_what_a_sink_never_took_is_told_with_both_times() -> None:
    """A timeout may have been a success, and an incident is not lost unseen."""
    notices = Notices(HOOK, AlertSettings())
    assert refused(notices, [view("A", "SEV-1")], 0) == ["A firing"]
    assert due(notices, [], 5) == []
    notice = notices.next([], (), 30, "at 30")
    assert notice is not None
    (alert,) = notice.alerts
    assert (alert.state, alert.since, alert.ended) == ("resolved", AT, "at 5")
    notices.on_refused(30)
    notice = notices.next([], (), 300, "at 300")
    assert notice is not None and notice.alerts == [alert], "the end stays when it was"
    notices.on_accepted(300, 300)
    assert due(notices, [], 400) == [] and notices.memory.known == []


def test_alert_that_came_and_went_while_a_sink_failed_is_told() -> None:
    notices = Notices(HOOK, AlertSettings(group_seconds=5))
    for now in (0, 5, 15, 35, 75):
        refused(notices, [view("A", "SEV-1")], now)
    assert due(notices, [view("A", "SEV-1"), view("B")], 80) == []
    assert due(notices, [view("A", "SEV-1"), view("B")], 85) == [], "due, but it is not tried yet"
    assert reported(notices, [view("A", "SEV-1")], 300) == ["A firing", "B resolved"]


def test_new_sev_1_does_not_wait_for_a_sink_to_be_tried_again() -> None:
    notices = Notices(HOOK, AlertSettings())
    for now in (0, 5, 15, 35, 75):
        refused(notices, [view("A", "SEV-1")], now)
    both = [view("A", "SEV-1"), view("B", "SEV-1")]
    assert due(notices, [view("A", "SEV-1")], 80) == []
    assert refused(notices, both, 85) == ["A firing", "B firing"]
    assert due(notices, both, 90) == [], "once"


def test_sink_that_takes_a_new_sev_1_is_working_again() -> None:
    notices = Notices(HOOK, AlertSettings())
    for now in (0, 5, 15, 35, 75):
        refused(notices, [view("A", "SEV-1")], now)
    assert reported(notices, [view("A", "SEV-1"), view("B", "SEV-1")], 80) == [
        *("A firing", "B firing"),
    ]
    assert due(notices, [view("B", "SEV-1")], 85) == []
    assert reported(notices, [view("B", "SEV-1")], 95) == ["B firing", "A resolved"]


def test_sev_1_that_was_taken_once_is_as_urgent_the_next_time() -> None:
    notices = Notices(HOOK, AlertSettings())
    reported(notices, [view("A", "SEV-1")], 0)
    reported(notices, [], 5)
    assert reported(notices, [], 15) == ["A resolved"]
    for now in (100, 105, 115, 135, 175):
        refused(notices, [view("B", "SEV-1")], now)
    assert due(notices, [view("A", "SEV-1"), view("B", "SEV-1")], 180) == ["A firing", "B firing"]


def test_log_gets_what_is_new_before_what_has_ended() -> None:
    notices = Notices(SinkSettings("log"), AlertSettings())
    reported(notices, [view("A", "SEV-1"), view("C", "SEV-1")], 0)
    assert reported(notices, [view("B"), view("C", "SEV-1")], 5) == []
    both = [view("B"), view("C", "SEV-1")]
    assert reported(notices, both, 15) == ["B firing", "A resolved"]
    assert reported(notices, both, 3615) == ["B firing", "C firing"], "repeated, as to a pager"


def test_nothing_overtakes_a_notice_that_is_under_way() -> None:
    notices = Notices(HOOK, AlertSettings(group_seconds=5))
    assert due(notices, [view("A", "SEV-1")], 0) == ["A firing"]
    assert due(notices, [], 5) == due(notices, [], 500) == [], "nobody knows how that ended"
    notices.on_accepted(505, 505)
    assert due(notices, [], 505) == [] and due(notices, [], 510) == ["A resolved"]
    assert due(notices, [view("A", "SEV-1")], 515) == [], "it fires again meanwhile"
    notices.on_accepted(515, 515)
    assert due(notices, [view("A", "SEV-1")], 520) == ["A firing"]


def test_test_that_a_sink_takes_brings_what_waits() -> None:
    notices = Notices(HOOK, AlertSettings())
    for now in (0, 5, 15, 35, 75):
        refused(notices, [view("A", "SEV-1")], now)
    assert due(notices, [view("A", "SEV-1")], 80) == []
    notices.on_tested()
    assert due(notices, [view("A", "SEV-1")], 85) == ["A firing"]


def test_next_process_knows_what_the_last_one_reported_and_owed() -> None:
    firing = [view("A", "SEV-1"), view("B", "SEV-1")]
    before = Notices(HOOK, AlertSettings())
    reported(before, [firing[0]], 1000)
    refused(before, firing, 1005)
    memory = decode(encode(before.memory), type=SinkMemory)
    after = Notices(HOOK, AlertSettings(), memory, now=7, wall_now=1100)
    assert reported(after, firing[:1], 8) == [], "B has ended; that waits for others"
    assert reported(after, firing[:1], 18) == ["A firing", "B resolved"]
    again = Notices(HOOK, AlertSettings(), memory, now=7, wall_now=1100)
    assert reported(again, firing, 7) == ["A firing", "B firing"], "B was never taken"
    assert again.waiting == 0


def test_restart_does_not_bring_the_repetition_forward() -> None:
    before = Notices(HOOK, AlertSettings())
    reported(before, [view("A", "SEV-1")], 1000)
    after = Notices(HOOK, AlertSettings(), before.memory, now=5, wall_now=2000)
    assert due(after, [view("A", "SEV-1")], 5) == due(after, [view("A", "SEV-1")], 2604) == []
    assert due(after, [view("A", "SEV-1")], 2605) == ["A firing"]
    back = Notices(HOOK, AlertSettings(), before.memory, now=5, wall_now=0)
    assert due(back, [view("A", "SEV-1")], 3604) == [], "a clock that was set back"
    assert due(back, [view("A", "SEV-1")], 3605) == ["A firing"]


def test_flood_is_told_in_bounded_notices_and_nothing_is_left_out() -> None:
    notices = Notices(HOOK, AlertSettings())
    flood = [view(f"A{n}", "SEV-1" if n < 30 else "SEV-3") for n in range(250)]
    heard: list[str] = []
    sizes = []
    for now in range(0, 60, 5):
        if found := reported(notices, flood, now):
            heard += found
            sizes.append(len(found))
    assert sizes == [100, 100, 50], "and then only after an hour"
    assert len(set(heard)) == 250 and heard[:30] == [f"A{n} firing" for n in range(30)]
    ends = [each for now in range(100, 160, 5) for each in reported(notices, [], now)]
    assert sorted(ends) == sorted(f"A{n} resolved" for n in range(250))
    assert notices.memory.known == []


def test_memory_of_a_flood_is_bounded_and_keeps_the_worst() -> None:
    notices = Notices(HOOK, AlertSettings())
    flood = [view(f"A{n}") for n in range(REMEMBERED_MAX)] + [view("Bad", "SEV-1")]
    due(notices, flood, 0)
    known = notices.memory.known
    assert len(known) == REMEMBERED_MAX and known[0].alert.name == "Bad"


def test_same_news_has_the_same_number_until_it_is_taken() -> None:
    body = notice_body(Notice([view("A")]), "pager", "node_1", "http://n")
    again = notice_body(Notice([view("A")]), "pager", "node_1", "http://n")
    assert notice_id(body, 5.0) == notice_id(again, 5.0)
    worse = notice_body(Notice([view("A", "SEV-1")]), "pager", "node_1", "http://n")
    other = notice_body(Notice([view("A")]), "mail", "node_1", "http://n")
    ids = {notice_id(body, 5.0), notice_id(body, 6.0), notice_id(worse, 5.0)}
    ids.add(notice_id(other, 5.0))
    assert len(ids) == 4


def test_worst_of_an_alert_stands_for_it() -> None:
    alerts = [
        view("A", "warning"),
        view("B", "SEV-3"),
        view("A", "SEV-2"),
        view("A", "SEV-3", d="x"),
    ]
    pending = structs.replace(view("C", "SEV-1"), state="pending")
    shown = [(each.name, each.severity, each.labels) for each in worst_of_each([pending, *alerts])]
    assert shown.pop() == ("C", "SEV-1", {}), "what does not fire yet comes last"
    assert shown == [("A", "SEV-2", {}), ("B", "SEV-3", {}), ("A", "SEV-3", {"d": "x"})]


def test_oldest_of_equals_is_shown_first() -> None:
    alerts = [
        structs.replace(view(name), since=since)
        for name, since in (("Consequence", "2026-01-01T00:01"), ("Cause", "2026-01-01T00:00"))
    ]
    assert [each.name for each in worst_of_each(alerts)] == ["Cause", "Consequence"]


def test_alert_that_becomes_worse_keeps_its_fingerprint() -> None:
    def identity(alert: AlertView) -> str:
        body = notice_body(Notice([alert]), "pager", "node_1", "")
        return str(body["alerts"][0]["fingerprint"])

    assert identity(view("A", "warning")) == identity(view("A", "SEV-2"))
    assert identity(view("A", "SEV-2")) != identity(view("A", "SEV-2", dependency="store"))


def test_notice_has_the_shape_of_alertmanager() -> None:
    notice = Notice([view("A", "SEV-1", dependency="store")], left_out=5)
    body = notice_body(notice, "pager", "node_1", "http://n")
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
    assert body["truncatedAlerts"] == 5


def test_notice_says_when_an_alert_ended_and_whether_one_still_fires() -> None:
    ended = structs.replace(view("B"), state="resolved", ended="2026-01-01T00:09:00.000Z")
    both = notice_body(Notice([view("A"), ended]), "pager", "node_1", "")
    assert [each["status"] for each in both["alerts"]] == ["firing", "resolved"]
    assert both["alerts"][1]["endsAt"] == ended.ended and both["status"] == "firing"
    assert notice_body(Notice([ended]), "pager", "node_1", "")["status"] == "resolved"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"kind": "webhook"}, "a webhook has a url"),
        ({"kind": "webhook", "url": "ftp://x"}, "http://"),
        ({"kind": "webhook", "url": "http:///hook"}, "needs a host"),
        ({"kind": "webhook", "url": "http://[::1/"}, "needs a host"),
        ({"kind": "webhook", "url": "http://pager:99999/"}, "a port from 1 to 65535"),
        ({"kind": "webhook", "url": "http://pager:0/"}, "a port from 1 to 65535"),
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
