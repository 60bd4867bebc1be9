"""What the doctor finds: each check on a deployment that is good, and on a bad one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.access.secrets import KEYS_FILE, SECRETS_FILE
from holdfast.access.settings import AccessSettings
from holdfast.access.tokens import TokenSettings
from holdfast.drivers.sqlite.database import SqliteSettings
from holdfast.node import doctor
from holdfast.node.doctor import Deployment, Finding, Grade, grade
from holdfast.settings import DurabilitySettings, ServerSettings, Settings
from holdfast.telemetry.notices import AlertSettings, SinkSettings
from holdfast.webhooks.delivery import WebhookSettings
from holdfast.webhooks.parts import WorkSettings

NOW = time.time()
HEALTHY: dict[str, Any] = {"ready": True, "alerts": []}
SINK = AlertSettings((SinkSettings("webhook", url="http://x/"),))


def of(state: Path, status: Any = HEALTHY, **settings: Any) -> dict[str, Finding]:
    """The worst finding of each check."""
    found: dict[str, Finding] = {}
    deployment = Deployment(Settings(**{"alerts": SINK, **settings}), state, status, NOW)
    for each in sorted(grade(deployment), key=lambda each: each.grade):
        found[each.check] = each
    return found


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory as it should be: private, with a fresh backup."""
    folder = tmp_path / "state"
    backup = folder / "backups" / "backup-1"
    backup.mkdir(parents=True)
    (backup / "manifest.json").write_text("{}")
    folder.chmod(0o700)
    return folder


def test_good_deployment_has_nothing_bad(state: Path) -> None:
    found = of(state)
    checked = {"server", "state directory", "disk", "fsync", "open files", "clock", "proxy"}
    checked |= {"TLS", "tokens", "keys", "backups", "engines", "alerts"}
    assert checked == set(found)
    on_any_machine = ("server", "state directory", "proxy", "TLS", "tokens", "backups", "engines")
    assert {found[name].grade for name in on_any_machine} == {Grade.good}


@pytest.mark.parametrize(
    ("status", "expected", "said"),
    [
        (None, Grade.bad, "does not answer"),
        ({"ready": False, "alerts": []}, Grade.bad, "is not ready"),
        ({"alerts": [{"severity": "SEV-2", "name": "X"}]}, Grade.bad, "alerts fire: SEV-2 X"),
        ({"alerts": [{"severity": "warning", "name": "X"}]}, Grade.look, "alerts fire: warning X"),
    ],
)
def test_server_is_graded_by_its_status(
    state: Path, status: Any, expected: Grade, said: str
) -> None:
    assert of(state, status)["server"][1:3] == (expected, said)


def test_server_whose_status_cannot_be_seen_is_not_called_down(state: Path) -> None:
    for status, expected in ((None, Grade.bad), ({"ready": True}, Grade.look)):
        (found, *_) = grade(Deployment(Settings(), state, status, NOW, "no key is here"))
        assert found.check == "server" and found.grade == expected
        assert found.what.endswith("no key is here")


def sink(**fields: str) -> dict[str, Any]:
    return {
        "name": "pager",
        "kind": "webhook",
        "severity": "SEV-3",
        "last": "",
        "error": "",
    } | fields


@pytest.mark.parametrize(
    ("sinks", "expected", "said"),
    [
        ([sink(last="2026-01-01T00:00Z")], Grade.good, "pager took the last notice, 2026-01-01"),
        ([sink()], Grade.look, "pager has not taken a notice yet"),
        (
            [sink(last="2026-01-01", error="it answered 500")],
            Grade.bad,
            "did not take the last notice: it answered 5",
        ),
        ([sink(name="log", kind="log")], Grade.look, "go to the log only"),
        ([sink(name="log", kind="log"), sink(last="x")], Grade.good, "pager took the last notice"),
    ],
)
def test_sinks_of_the_running_server_are_graded_not_those_of_the_settings(
    state: Path, sinks: list[Any], expected: Grade, said: str
) -> None:
    for alerts in (SINK, AlertSettings()):
        settings = Settings(alerts=alerts)
        findings = grade(Deployment(settings, state, HEALTHY, NOW, sinks=sinks))
        (found,) = [each for each in findings if each.check == "alerts"]
        assert found.grade is expected and said in found.what
        assert bool(found.advice) == bool(found.grade)


def worse_settings() -> Iterator[Any]:
    def case(check: str, expected: Grade, **settings: Any) -> Any:
        return pytest.param(check, expected, settings, id=f"{check} {expected.name}")

    def tokens(days: float) -> Any:
        return AccessSettings(tokens=TokenSettings(ttl_seconds_max=days * 86400))

    wide = ServerSettings(trusted_proxies=("10.0.0.0/8",))
    yield case("proxy", Grade.bad, server=wide)
    yield case("proxy", Grade.look, server=ServerSettings(allowed_origins=("https://a.example",)))
    yield case("TLS", Grade.bad, server=ServerSettings(allowed_origins=("http://a.example",)))
    yield case("tokens", Grade.look, access=tokens(31))
    yield case("tokens", Grade.bad, access=tokens(400))
    normal = DurabilitySettings(sqlite=SqliteSettings(synchronous="NORMAL"))
    yield case("engines", Grade.bad, durability=normal)
    private = WorkSettings(webhooks=WebhookSettings(private_allowed=True))
    yield case("engines", Grade.bad, work=private)
    yield case("alerts", Grade.look, alerts=AlertSettings())
    yield case("alerts", Grade.look, alerts=AlertSettings((SinkSettings("log"),)))


@pytest.mark.parametrize(("check", "expected", "settings"), worse_settings())
def test_setting_that_is_worse_is_found_with_advice(
    state: Path, check: str, expected: Grade, settings: dict[str, Any]
) -> None:
    finding = of(state, **settings)[check]
    assert finding.grade is expected and finding.advice


def test_state_directory_of_others_and_a_missing_one_are_bad(state: Path, tmp_path: Path) -> None:
    state.chmod(0o777)
    assert of(state)["state directory"][1:] == (
        Grade.bad,
        f"others can write to {state}",
        f"chmod go-w {state}",
    )
    missing = of(tmp_path / "none")
    assert missing["state directory"].grade is Grade.bad
    assert missing["disk"].what.startswith("could not be looked at")


@pytest.mark.parametrize("name", [SECRETS_FILE, KEYS_FILE])
def test_secrets_that_others_can_read_are_bad(state: Path, name: str) -> None:
    (state / name).write_text("[]" if name == KEYS_FILE else "{}")
    (state / name).chmod(0o644)
    finding = of(state)["keys"]
    assert (finding.grade, finding.advice) == (Grade.bad, f"chmod 600 {state / name}")


@pytest.mark.parametrize(
    ("hours", "expected"), [(1, Grade.good), (30, Grade.look), (24 * 9, Grade.bad)]
)
def test_age_of_the_newest_backup_is_graded(state: Path, hours: float, expected: Grade) -> None:
    manifest = state / "backups" / "backup-1" / "manifest.json"
    os.utime(manifest, (NOW - hours * 3600,) * 2)
    assert of(state)["backups"].grade is expected
    manifest.rename(manifest.with_name("other"))
    assert of(state)["backups"][1:3] == (Grade.bad, "there is none")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.000_001, Grade.bad), (0.001, Grade.good), (0.01, Grade.look), (0.1, Grade.bad)],
)
def test_fsync_is_graded_by_its_median(
    state: Path, seconds: float, expected: Grade, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(n * seconds for n in range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    (found,) = doctor._fsync(Deployment(Settings(), state, HEALTHY, NOW))
    assert found.grade is expected
