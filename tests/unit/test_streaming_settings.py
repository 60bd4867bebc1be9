"""Settings of providers and models: what stops the start, with its path and reason."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

import pytest

from holdfast.bounds import MIB
from holdfast.errors import BadSetting
from holdfast.settings import Settings, load
from holdfast.streaming.reply_log.contract import (
    BEGUN_SECONDS,
    ENDED_SECONDS,
    LOG_BYTES_MAX,
    LOG_ENTRIES_MAX,
)
from holdfast.streaming.settings import StreamingSettings

OPENAI = """
[[streaming.providers]]
name = "openai"
base_url = "https://api.example.com/v1"
key_env = "OPENAI_KEY"
concurrency_max = 5
"""
MODEL = """
[[streaming.models]]
name = "fast"
providers = ["openai:gpt-fast"]
"""


def streaming(tmp_path: Path, text: str) -> StreamingSettings:
    file = tmp_path / "holdfast.toml"
    file.write_text(text)
    return load(file, {}, {}).streaming


def test_nothing_set_is_one_scripted_provider_with_one_model() -> None:
    settings = StreamingSettings()
    assert [(p.name, p.kind, p.pool) for p in settings.providers_in_use] == [
        ("scripted", "scripted", "default")
    ]
    assert [(m.name, m.providers) for m in settings.models_in_use] == [
        ("scripted", ("scripted:scripted",))
    ]


def test_defaults_are_those_of_the_design() -> None:
    settings = Settings()
    streaming, http = settings.streaming, settings.access.http
    queue = streaming.queue_failover
    assert (queue.enabled, queue.timeout_seconds, queue.max_retries) == (True, 30, 5)
    assert (queue.base_delay_ms, queue.max_delay_ms) == (100, 5000)
    waiting = (queue.waiting_max, queue.waiting_per_tenant, queue.waiting_per_user)
    assert waiting == (10_000, 5_000, 10)
    sizes = (queue.bytes_max, queue.bytes_per_key_max, queue.bytes_per_user_max)
    assert sizes == (256 * MIB, 128 * MIB, 16 * MIB)
    assert (streaming.pool.total, streaming.pool.per_user) == (10_000, 3)
    assert streaming.replies_bytes_max == 256 * MIB
    assert astuple(streaming.clocks) == (15, 60, 120, 60, 600, 280)
    assert astuple(streaming.times) == (15, 5, 30, 30, 20)
    assert (http.connections_max, http.per_address_max) == (32_000, 10_000)
    assert (LOG_BYTES_MAX, LOG_ENTRIES_MAX) == (MIB, 32_000)
    assert (BEGUN_SECONDS, ENDED_SECONDS) == (30 * 60, 10 * 60)


def test_provider_with_a_bound_has_its_own_pool(tmp_path: Path) -> None:
    settings = streaming(tmp_path, OPENAI + MODEL)
    assert settings.providers_in_use[0].pool == "openai"
    assert settings.models_in_use[0].providers == ("openai:gpt-fast",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (OPENAI.replace("key_env", "key_enf") + MODEL, r"streaming\.providers\[0\]\.key_enf"),
        (
            "[[streaming.providers]]\nname='a'\nkind='scripted'\nscript={tokns=3}\n",
            r"streaming\.providers\[0\]\.script\.tokns",
        ),
        (OPENAI + MODEL + "clocks = {gap=3}\n", r"streaming\.models\[0\]\.clocks\.gap"),
        (OPENAI + MODEL.replace("openai:", "opnai:"), "fast: there is no provider 'opnai'"),
        (OPENAI + MODEL.replace("openai:gpt-fast", "openai"), "fast: providers must be provider:"),
        (OPENAI + MODEL.replace('"openai:gpt-fast"', ""), "fast has no provider"),
        (OPENAI + OPENAI + MODEL, "providers: two are called 'openai'"),
        (OPENAI + MODEL + MODEL, "models: two are called 'fast'"),
        (OPENAI, "streaming.models: no model uses"),
        (OPENAI.replace('"openai"', '"open ai"') + MODEL, "name must be 1 to 64 letters"),
        (OPENAI.replace('"openai"', '"default"') + MODEL, "default is the name of the pool"),
        (OPENAI.replace("= 5", "= -5") + MODEL, "openai: concurrency_max must not be negative"),
        (OPENAI.replace("https://", "ftp://") + MODEL, "openai: base_url must begin with"),
        (OPENAI.replace("api.example.com", "") + MODEL, "openai: base_url must begin with"),
        (OPENAI.replace("api.", "me:secret@api.") + MODEL, "base_url carries no credentials"),
        (OPENAI.replace("/v1", "/v1?key=secret") + MODEL, "base_url carries no credentials"),
        (OPENAI.replace("api.example.com", "[::") + MODEL, "base_url is malformed"),
        (OPENAI + "script={tokens=3}" + MODEL, "script is for scripted providers only"),
        (OPENAI + "kind='scripted'" + MODEL, "openai: a scripted provider takes no base_url"),
        (OPENAI + "kind='anthropic'" + MODEL, r"streaming\.providers"),
        (OPENAI + MODEL + "clocks = {gap_seconds=0}", "gap_seconds must be greater than 0"),
        (OPENAI + MODEL + "clocks = {gap_seconds=nan}", r"streaming\.models must be a number"),
        (
            "[[streaming.providers]]\nname='a'\nkind='scripted'\nscript={tokens=-1}\n",
            "tokens must not be negative",
        ),
        (
            "[[streaming.assistants]]\ntenant='t'\nuser='bot'\nmodel='none'\n",
            "bot: there is no model 'none'",
        ),
    ],
)
def test_wrong_providers_and_models_stop_the_start(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadSetting, match=said) as refusal:
        streaming(tmp_path, text)
    assert "secret" not in str(refusal.value)


def test_misspelt_name_in_a_variable_stops_the_start() -> None:
    variable = {"HOLDFAST_STREAMING__PROVIDERS": '[{"name":"a","bse_url":"https://a"}]'}
    with pytest.raises(BadSetting, match=r"streaming\.providers\[0\]\.bse_url"):
        load(None, variable, {})
