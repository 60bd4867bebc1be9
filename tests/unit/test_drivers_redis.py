"""Addresses of Redis, and why it does not answer: errors show no part of a password."""

from __future__ import annotations

import ssl
from types import SimpleNamespace
from typing import Any

import pytest
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    SentinelConnectionPool,
    SentinelManagedSSLConnection,
)
from redis.exceptions import AuthenticationError, InvalidResponse, NoPermissionError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeout

from holdfast.drivers.redis import REASONS, connection_pool, trouble_of
from holdfast.drivers.redis_scripts import Script, ScriptRunner
from holdfast.drivers.redis_url import check_redis_url, sentinel_address
from holdfast.errors import Unavailable
from holdfast.limits.composition import LimitsSettings


def test_a_sentinel_url_names_sentinels_service_database_and_credentials() -> None:
    service = sentinel_address(
        "redis+sentinel://ann:p%40ss@a:1,b,[::1]:3/my%2Fmaster/7"
        "?sentinel_password=s%26p&socket_keepalive=true"
    )
    assert service is not None
    assert service.sentinels == (("a", 1), ("b", 26379), ("::1", 3))
    assert (service.service, service.username, service.password) == ("my/master", None, "s&p")
    pool = connection_pool(
        "redis+sentinel://ann:p%40ss@a:1/m/7?sentinel_password=q&socket_keepalive=true"
    )
    assert isinstance(pool, SentinelConnectionPool)
    kwargs = pool.connection_kwargs
    assert (kwargs["username"], kwargs["password"], kwargs["db"]) == ("ann", "p@ss", 7)
    (sentinel,) = pool.sentinel_manager.sentinels
    asked = sentinel.connection_pool.connection_kwargs
    assert (asked["host"], asked["port"], asked["username"], asked["password"]) == (
        "a",
        1,
        None,
        "q",
    )


def test_a_sentinel_url_with_tls_is_tls_to_sentinels_and_servers() -> None:
    pool = connection_pool("rediss+sentinel://a:1/m?ssl_ca_certs=/ca.pem")
    assert issubclass(pool.connection_class, SentinelManagedSSLConnection)
    (sentinel,) = pool.sentinel_manager.sentinels
    assert sentinel.connection_pool.connection_class.__name__ == "SSLConnection"
    assert sentinel.connection_pool.connection_kwargs["ssl_ca_certs"] == "/ca.pem"


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://a:1",
        "redis+sentinel://a:1/",
        "redis+sentinel://a:x/m",
        "redis+sentinel:///m",
        "redis+sentinel://a:1,/m",
        "redis+sentinel://a:99999/m",
        "redis+sentinel://a:1/m/x",
        "memcached://a",
        "redis",
        "redis://:S3C/RET@host:1/0",
        "redis://u:S3C#RET@host:1/0",
        "redis+sentinel://:S3C/RET@host:1/m",
    ],
)
def test_a_wrong_url_is_refused_without_showing_any_of_it(url: str) -> None:
    with pytest.raises(ValueError) as raised:
        check_redis_url(url)
    with pytest.raises(ValueError) as refused:
        LimitsSettings(counters_url=url)
    assert not {"S3C", "RET"} & {
        part for part in ("S3C", "RET") if part in f"{raised.value} {refused.value}"
    }


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("WRONGPASS invalid username-password pair or user is disabled.", "auth"),
        ("NOAUTH Authentication required.", "auth"),
        (AuthenticationError("invalid username-password pair"), "auth"),
        ("NOPERM User x has no permissions to run the 'evalsha' command", "permission"),
        (
            "ERR ACL failure in script: User x has no permissions to run the 'time' command",
            "permission",
        ),
        (NoPermissionError("this user has no permissions"), "permission"),
        (
            (
                "OOM command not allowed when used memory > 'maxmemory'. script: 1f, on"
                " @user_script:9."
            ),
            "full",
        ),
        ("READONLY You can't write against a read only replica.", "read_only"),
        ("LOADING Redis is loading the dataset in memory", "loading"),
        ("MASTERDOWN Link with MASTER is down", "loading"),
        ("BUSY Redis is busy running a script.", "busy"),
        ("MISCONF Redis is configured to save RDB snapshots", "refuses_writes"),
        ("NOREPLICAS Not enough good replicas to write.", "refuses_writes"),
        ("CROSSSLOT Keys in request don't hash to the same slot", "cluster"),
        ("MOVED 866 127.0.0.1:7001", "cluster"),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", "wrong_type"),
        ("ERR user_script:12: attempt to index a nil value", "script"),
        ("ERR unknown command 'EVALSHA'", "refused"),
        (RedisConnectionError("max number of clients reached"), "connections"),
        (MasterNotFoundError("No master found for 'm'"), "no_primary"),
        (InvalidResponse("Protocol error"), "not_redis"),
        (RedisTimeout("Timeout reading"), "timeout"),
        (ConnectionRefusedError(111, "refused"), "unreachable"),
        (RedisConnectionError("Error 111 connecting"), "unreachable"),
    ],
)
def test_every_error_has_a_reason_of_a_closed_set(error: Exception | str, reason: str) -> None:
    found, detail = trouble_of(error, "redis://host/0")
    assert (found, bool(detail)) == (reason, True)
    assert reason in REASONS


def test_a_tls_error_is_found_behind_the_one_that_redis_py_raises() -> None:
    try:
        try:
            raise ssl.SSLCertVerificationError("certificate verify failed")
        except ssl.SSLError as inner:
            raise RedisConnectionError("Error 1 connecting") from inner
    except RedisConnectionError as error:
        assert trouble_of(error, "rediss://host/0")[0] == "tls"


@pytest.mark.parametrize("written", ["S3CRET%40x", "S3CRET"])
def test_a_password_that_redis_repeats_is_taken_out(written: str) -> None:
    """An old server, or a proxy, that does not know AUTH answers with its arguments."""
    meant = written.replace("%40", "@")
    for url in (
        f"redis://ann:{written}@host/0",
        f"redis+sentinel://a:1/m?sentinel_password={written}",
    ):
        _, detail = trouble_of(
            f"ERR unknown command 'AUTH', with args beginning with: '{meant}' '{written}'", url
        )
        assert "S3CRET" not in detail and "AUTH" in detail


async def test_call_on_a_connection_that_is_lost_at_once_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A transport that is closed raises when it is written to."""
    runner = ScriptRunner("redis://127.0.0.1:1/0", "the log", lambda _reason: None)

    async def open_lost() -> Any:
        return SimpleNamespace(usable=False)

    monkeypatch.setattr(runner, "_open", open_lost)
    with pytest.raises(Unavailable, match="cannot be reached"):
        await runner.run(Script("holdfast.streaming.reply_log"), [], (), str)
