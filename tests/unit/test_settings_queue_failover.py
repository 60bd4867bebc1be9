"""The variables of the design document set the queue of replies."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import BadSetting
from holdfast.settings import load

GIVEN = {
    "QUEUE_FAILOVER_ENABLED": "false",
    "QUEUE_FAILOVER_TIMEOUT_SECONDS": "12",
    "QUEUE_FAILOVER_MAX_RETRIES": "2",
    "QUEUE_FAILOVER_BASE_DELAY_MS": "50",
    "QUEUE_FAILOVER_MAX_DELAY_MS": "1000",
}


@pytest.mark.covers("002 the settings by their names")
@pytest.mark.parametrize("prefix", ["", "HOLDFAST_"])
@pytest.mark.covers("002 all behaviour is set by settings")
def test_each_variable_of_the_document_works_bare_and_with_the_prefix(prefix: str) -> None:
    environ = {prefix + name: value for name, value in GIVEN.items()}
    queue = load(None, environ, {}).streaming.queue_failover
    assert (queue.enabled, queue.timeout_seconds, queue.max_retries) == (False, 12, 2)
    assert (queue.base_delay_ms, queue.max_delay_ms) == (50, 1000)


def test_two_names_of_a_setting_may_agree(tmp_path: Path) -> None:
    file = tmp_path / "holdfast.toml"
    file.write_text("[streaming.queue_failover]\ntimeout_seconds = 30.0\nenabled = true\n")
    environ = {
        "QUEUE_FAILOVER_TIMEOUT_SECONDS": "30",
        "HOLDFAST_QUEUE_FAILOVER_TIMEOUT_SECONDS": "30.0",
        "QUEUE_FAILOVER_ENABLED": "True",
    }
    assert load(file, environ, {}).streaming.queue_failover.timeout_seconds == 30


@pytest.mark.parametrize(
    "environ",
    [
        {"QUEUE_FAILOVER_MAX_RETRIES": "1", "HOLDFAST_QUEUE_FAILOVER_MAX_RETRIES": "2"},
        {"QUEUE_FAILOVER_MAX_RETRIES": "1", "HOLDFAST_STREAMING__QUEUE_FAILOVER__MAX_RETRIES": "2"},
    ],
)
def test_two_names_with_different_values_stop_the_start(environ: dict[str, str]) -> None:
    with pytest.raises(BadSetting, match="QUEUE_FAILOVER_MAX_RETRIES"):
        load(None, environ, {})


def test_value_that_cannot_be_is_refused_with_its_path() -> None:
    with pytest.raises(BadSetting, match=r"streaming\.queue_failover"):
        load(None, {"QUEUE_FAILOVER_TIMEOUT_SECONDS": "soon"}, {})
    with pytest.raises(BadSetting, match="base_delay_ms"):
        load(None, {"QUEUE_FAILOVER_BASE_DELAY_MS": "9000"}, {})


@pytest.mark.parametrize("prefix", ["", "HOLDFAST_"])
def test_misspelt_name_stops_the_start_and_names_those_that_exist(prefix: str) -> None:
    with pytest.raises(BadSetting) as caught:
        load(None, {f"{prefix}QUEUE_FAILOVER_ENABLD": "false"}, {})
    text = caught.value.message
    assert f"{prefix}QUEUE_FAILOVER_ENABLD;" in text
    assert all(name in text for name in GIVEN)
