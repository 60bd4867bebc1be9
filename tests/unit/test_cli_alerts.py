"""The lines with which ``holdfast status`` begins, and durations of silences."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.api import alerts as api
from holdfast.cli.alerts import REASONS_SHOWN, SILENCE_SECONDS_MAX, problem_lines, seconds_of
from holdfast.errors import InvalidMessage

ALERT = {
    "name": "HoldfastBreakerOpen",
    "severity": "SEV-2",
    "labels": {"dependency": "store"},
    "means": "It is.",
    "since": "2026-01-01T00:00:00.000Z",
    "runbook": "docs/guides/runbooks/breaker-open.md",
    "silenced_until": "",
}
HALTED = {"count": 7, "chats": [{"chat_id": f"chat_{n}", "why": "no counter"} for n in range(5)]}


def lines(**status: Any) -> list[str]:
    return list(problem_lines(status))


def test_server_without_trouble_has_no_line() -> None:
    disk = {"bytes": 100_000_000_000, "free_bytes": 10_000_000_000}
    dead = {"fanout": {}, "jobs": {}}
    assert lines(alerts=[], pending=[], halted_chats=None, dead_by_reason=dead, disk=disk) == []
    found = lines(unknown=["halted_chats", "nodes"])
    assert found == ["unknown, because the store did not say in time: halted_chats, nodes"]
    assert lines() == [], "an older server says nothing of it"


def test_firing_alert_comes_first_with_its_runbook() -> None:
    silenced = {**ALERT, "name": "HoldfastFanoutLag", "labels": {}, "silenced_until": "2026-01-02"}
    pending = {**ALERT, "name": "HoldfastStoreDown", "labels": {}}
    assert lines(pending=[pending], alerts=[ALERT, silenced], halted_chats=HALTED) == [
        "SEV-2 HoldfastBreakerOpen (dependency=store): It is. Since 2026-01-01T00:00:00.000Z."
        " Open docs/guides/runbooks/breaker-open.md",
        "SEV-2 HoldfastFanoutLag: It is. Since 2026-01-01T00:00:00.000Z, silenced until"
        " 2026-01-02. Open docs/guides/runbooks/breaker-open.md",
        "pending HoldfastStoreDown: It is. Open docs/guides/runbooks/breaker-open.md",
        "7 halted chats: chat_0 (no counter), chat_1 (no counter), chat_2 (no counter);"
        " `holdfast chat ls --halted` lists them",
    ]


def test_alert_that_follows_from_another_is_shown_under_it() -> None:
    effect = {**ALERT, "name": "HoldfastStoreDown", "labels": {}, "severity": "SEV-1"}
    found = lines(alerts=[ALERT, {**effect, "explained_by": "HoldfastDiskFull"}])
    assert found[0].startswith("SEV-2 HoldfastBreakerOpen")
    assert found[1] == (
        "  SEV-1 HoldfastStoreDown, which follows from HoldfastDiskFull: It is. Since"
        " 2026-01-01T00:00:00.000Z. Open docs/guides/runbooks/breaker-open.md"
    )


def test_dead_letters_and_a_full_disk_have_their_lines() -> None:
    found = lines(
        dead_by_reason={
            "fanout": {"event": 1, "undecodable": 2},
            "jobs": {"buried": 1, "poison_message": 3, "throttled": 1200},
        },
        disk={"bytes": 100_000_000_000, "free_bytes": 9_000_000_000},
    )
    assert found[:2] == [
        "dead letters of fanout: 2 undecodable, 1 event; `holdfast dead ls --of fanout` lists them",
        "dead letters of jobs: 1200 throttled, 3 poison_message, 1 buried; `holdfast dead ls"
        " --of jobs` lists them",
    ]
    assert found[2] == "disk: 9.0 GB of 100 GB are left"
    (small,) = lines(disk={"bytes": 64_000_000, "free_bytes": 1_200_000})
    assert small == "disk: 1.2 MB of 64 MB are left"
    (none,) = lines(disk={"bytes": 64_000_000, "free_bytes": 0})
    assert none == "disk: 0 MB of 64 MB are left"


def test_dead_letters_of_an_unavailable_store_are_unknown_and_not_none() -> None:
    found = lines(dead_by_reason={"fanout": None, "jobs": None}, unknown=["dead_letters_of_jobs"])
    assert found == ["unknown, because the store did not say in time: dead_letters_of_jobs"]


def test_line_of_many_reasons_is_bounded_and_keeps_the_most_frequent() -> None:
    reasons = {f"reason_{n}": n for n in range(1, 1001)}
    (line,) = lines(dead_by_reason={"fanout": reasons, "jobs": {}})
    assert line.startswith("dead letters of fanout: 1000 reason_1000, 999 reason_999, ")
    last = 1001 - REASONS_SHOWN
    others = sum(range(1, last))
    assert f", {last} reason_{last}, {others} of other reasons; `holdfast" in line


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1d", 86400)]
)
def test_duration_is_read(text: str, seconds: int) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "m", "1w", "1h30m", "9999999s", "٣h", "1 h"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidMessage, match="is a number with s, m, h or d, as in 30m"):
        seconds_of(text)


@pytest.mark.parametrize("text", ["0", "0s", "00d", "-1", "-1h", "-30m"])
def test_silence_of_no_time_is_refused_with_the_command_that_ends_one(text: str) -> None:
    with pytest.raises(InvalidMessage, match=r"longer than nothing.*holdfast alerts unsilence"):
        seconds_of(text)


def test_silence_is_not_longer_than_the_server_allows() -> None:
    assert seconds_of("30d") == SILENCE_SECONDS_MAX == api.SILENCE_SECONDS_MAX
    with pytest.raises(InvalidMessage, match="at most 30d, not 31d"):
        seconds_of("31d")
