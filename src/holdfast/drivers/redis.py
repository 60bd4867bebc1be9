"""Connections to Redis by URL, reasons of failure, and fitness to keep our state."""

from __future__ import annotations

import ssl
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from redis.asyncio.connection import AbstractConnection, ConnectionPool, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    InvalidResponse,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeout

from holdfast.drivers.redis_url import SentinelAddress, secrets_of, sentinel_address, split_options
from holdfast.errors import BadSetting
from holdfast.telemetry import safe_text

RedisReason = Literal[
    "unreachable", "timeout", "tls", "auth", "permission", "full", "read_only", "loading",
    "busy", "refuses_writes", "connections", "cluster", "eviction", "no_primary",
    "wrong_type", "script", "not_redis", "refused",
]  # fmt: skip
REASONS: tuple[str, ...] = get_args(RedisReason)
DETAIL_CHARACTERS_MAX = 200

_BY_CODE: dict[str, RedisReason] = {
    "WRONGPASS": "auth", "NOAUTH": "auth", "NOPERM": "permission", "OOM": "full",
    "READONLY": "read_only", "LOADING": "loading", "MASTERDOWN": "loading", "BUSY": "busy",
    "MISCONF": "refuses_writes", "NOREPLICAS": "refuses_writes", "MOVED": "cluster",
    "ASK": "cluster", "CROSSSLOT": "cluster", "CLUSTERDOWN": "cluster", "TRYAGAIN": "cluster",
    "WRONGTYPE": "wrong_type",
}  # fmt: skip
"""The first word of an error that Redis answers → our reason."""
_BY_TEXT: tuple[tuple[str, RedisReason], ...] = (
    ("ACL failure", "permission"), ("max number of clients", "connections"),
    ("without any password", "auth"), ("user_script", "script"), ("Script", "script"),
    ("script", "script"),
)  # fmt: skip


class UnfitRedis(RedisError):
    """Redis answers, but must not keep our state. ``fatal``: an operator must act."""

    def __init__(self, reason: RedisReason, message: str, *, fatal: bool) -> None:
        super().__init__(message)
        self.reason = reason
        self.fatal = fatal


def connection_pool(url: str, **options: Any) -> ConnectionPool:
    """Connections to the server, or to the service's current primary. No retries.

    BadSetting if a file with a password cannot be read.
    """
    url, ours = split_options(url)
    options["retry"] = Retry(NoBackoff(), 0)
    if file := ours.get("password_file"):
        options["password"] = _password_in(file)
    service = sentinel_address(url)
    if service is not None and (file := ours.get("sentinel_password_file")):
        service = service._replace(password=_password_in(file))
    if service is None:
        pool = ConnectionPool.from_url(url, **options)
    else:
        pool = _service_pool(service, options)
    pool.connection_class = _with_redis_errors(pool.connection_class)  # type: ignore[arg-type]
    return pool


def _password_in(file: str) -> str:
    try:
        return Path(file).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"the file {file} with a password of Redis: {error}") from None


def _service_pool(service: SentinelAddress, options: dict[str, Any]) -> ConnectionPool:
    server: dict[str, Any] = {**parse_url(service.server_url), **options}
    server.pop("host", None)
    tls = server.pop("connection_class", None) is SSLConnection
    shared = {name: value for name, value in server.items() if name.startswith(("socket_", "ssl_"))}
    waits = options.get("socket_connect_timeout")  # the same wait for a sentinel
    asked = {
        **shared,
        "socket_timeout": waits,
        "ssl": tls,
        "username": service.username,
        "password": service.password,
        "retry": options["retry"],
    }
    sentinel = Sentinel(service.sentinels, sentinel_kwargs=asked)  # type: ignore[no-untyped-call]
    pool: ConnectionPool = SentinelConnectionPool(  # type: ignore[no-untyped-call]
        service.service, sentinel, ssl=tls, **server
    )
    return pool


@cache
def _with_redis_errors(kind: type[AbstractConnection]) -> type[AbstractConnection]:
    """The same connection, but a command on one that was lost raises what redis-py
    documents. A closed transport of uvloop raises RuntimeError.
    """

    class RedisErrorsConnection(kind):  # type: ignore[misc, valid-type]
        async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
            try:
                await super().send_packed_command(command, check_health)
            except RuntimeError as error:
                raise RedisConnectionError("the connection was lost") from error

    return RedisErrorsConnection


def trouble_of(error: BaseException | str, url: str) -> tuple[RedisReason, str]:
    """Why a call failed: a reason of the closed set, and the text without secrets.

    ``error`` is an exception of redis-py or the system, or an error reply of Redis.
    """
    text = error if isinstance(error, str) else str(error) or type(error).__name__
    for secret in secrets_of(url):
        text = text.replace(secret, "[secret]")
    return _reason(error), safe_text(" ".join(text.split()))[:DETAIL_CHARACTERS_MAX]


def _reason(error: BaseException | str) -> RedisReason:
    if isinstance(error, str):
        return _of_reply(error)
    if isinstance(error, UnfitRedis):
        return error.reason
    causes: list[BaseException] = [error]
    while (
        cause := causes[-1].__cause__ or causes[-1].__context__
    ) is not None and cause not in causes:
        causes.append(cause)
    kinds: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], RedisReason], ...] = (
        (InvalidResponse, "not_redis"),
        (MasterNotFoundError, "no_primary"),
        (ssl.SSLError, "tls"),
        (AuthenticationError, "auth"),
        (NoPermissionError, "permission"),
        ((RedisTimeout, TimeoutError), "timeout"),
    )
    for kind, reason in kinds:
        if any(isinstance(each, kind) for each in causes):
            return reason
    reply = _of_reply(str(error))
    return reply if isinstance(error, ResponseError) or reply != "refused" else "unreachable"


def _of_reply(text: str) -> RedisReason:
    by_code = _BY_CODE.get(text.partition(" ")[0])
    if by_code is not None:
        return by_code
    return next((reason for part, reason in _BY_TEXT if part in text), "refused")


async def check_server(connection: AbstractConnection) -> None:
    """UnfitRedis if this server must not keep our state. Raises what redis-py raises.

    If the user may not run INFO, the server counts as fit.
    """
    try:
        await connection.send_command("INFO")
        answer = await connection.read_response()
    except NoPermissionError:
        return
    check_info(read_info(answer))


def read_info(answer: object) -> bytes:
    """An answer to INFO; InvalidResponse if it is none."""
    if not isinstance(answer, bytes):
        raise InvalidResponse("what answers is no Redis")
    return answer


def check_info(answer: bytes) -> None:
    """UnfitRedis if this answer to INFO, whole or a section, shows an unfit server."""
    lines = (line.partition(":") for line in answer.decode(errors="replace").splitlines())
    info = {name: value.strip() for name, _, value in lines}
    if info.get("cluster_enabled") == "1" or info.get("redis_mode") == "cluster":
        raise UnfitRedis(
            "cluster",
            "this is Redis Cluster, which refuses calls for keys of several slots: use one primary,"
            " with replicas if you like, and redis+sentinel:// for failover",
            fatal=True,
        )
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and info.get("maxmemory", "0") != "0":
        raise UnfitRedis(
            "eviction",
            f"this Redis evicts keys when it is full (maxmemory-policy {policy}), and an evicted"
            " counter grants its limit again: set maxmemory-policy noeviction",
            fatal=True,
        )
    if info.get("role") == "slave":
        raise UnfitRedis(
            "read_only", "this Redis is a replica: writes need the primary", fatal=False
        )
