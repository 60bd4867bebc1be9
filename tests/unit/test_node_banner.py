"""What a node says of itself when it starts."""

from __future__ import annotations

import resource
import sys

import pytest

from holdfast.node.banner import banner_lines
from holdfast.node.lifecycle import open_files_max
from holdfast.settings import Settings, differences, load


@pytest.mark.parametrize(
    ("path", "value", "shown"),
    [
        (
            "work.url",
            "postgresql://ann:S3CRET@db:5432/x?sslmode=require",
            "postgresql://[secret]@db:5432/x?sslmode=require",
        ),
        ("work.url", "postgresql://db/x?user=ann&password=S3CRET&sslmode=require", None),
        ("limits.counters_url", "rediss://:S3CRET@cache/0", "rediss://[secret]@cache/0"),
        ("limits.counters_url", "rediss://:S3CR@ET@cache/0", "rediss://[secret]@cache/0"),
    ],
)
def test_the_password_of_an_engine_is_never_shown(path: str, value: str, shown: str | None) -> None:
    settings = load(None, {}, {path: value})
    printed = "\n".join(banner_lines(settings)) + str(list(differences(settings)))
    assert path in printed and "S3C" not in printed
    assert shown is None or shown in printed


@pytest.mark.parametrize(
    ("synchronous", "said"), [("FULL", "on disk"), ("NORMAL", "A POWER CUT MAY LOSE")]
)
def test_what_an_ack_means_is_said_as_it_is_set(synchronous: str, said: str) -> None:
    settings = load(None, {}, {"durability.sqlite.synchronous": synchronous})
    assert said in "\n".join(banner_lines(settings))


def test_banner_warns_when_the_machine_allows_too_few_sockets() -> None:
    printed = "\n".join(banner_lines(Settings(), 4_096))
    assert (
        "room for about 3,896 connections, not 132,000: raise the hard limit of open files"
        in printed
    )
    assert "sockets" not in "\n".join(banner_lines(Settings(), 1_048_576))


def test_a_node_takes_all_the_files_it_may_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1_024), hard))
        assert open_files_max() == (sys.maxsize if hard == resource.RLIM_INFINITY else hard)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_commands_of_a_server_with_a_file_of_token_keys_name_its_settings() -> None:
    settings = load(None, {}, {"access.tokens.secret_file": "/etc/holdfast/token.keys"})
    [line] = [
        line for line in banner_lines(settings) if "holdfast token" in line or "token --" in line
    ]
    assert "--config FILE" in line and "--state-dir" not in line
