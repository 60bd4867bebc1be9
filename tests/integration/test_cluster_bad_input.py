"""What a node of a cluster refuses to start with: each is named with what to do, and
nothing of the node is left running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from cluster_database import new_database

from engines import Server, free_port, postgres
from engines.fixtures import had
from holdfast.errors import BadSetting, HoldfastError, StateCorrupted, Unavailable
from holdfast.node.lifecycle import running
from holdfast.node.state_dir import held
from holdfast.settings import load
from holdfast.store.postgres import PostgresStore, PostgresStoreSettings
from holdfast.store.postgres.server import ChatsServer
from holdfast.work.postgres.store import migrate as migrate_jobs


async def refusal(folder: Path, url: str, **changes: Any) -> HoldfastError:
    """Why a node with this database does not start."""
    keys = folder / "token.keys"
    await asyncio.to_thread(keys.write_text, "k" * 32)
    await asyncio.to_thread(keys.chmod, 0o600)
    chosen = {
        "cluster.postgres": url,
        "access.tokens.secret_file": str(keys),
        "server.state_dir": str(folder / "state"),
        "server.port": free_port(),
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    settings = load(None, {}, chosen)
    before = asyncio.all_tasks()
    with pytest.raises(HoldfastError) as refused:
        async with asyncio.timeout(30), running(settings):
            pytest.fail("it serves")
    with held(settings.server.state_path):
        pass  # its lock is free, and so is its port:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", settings.server.port)
    server.close()
    assert asyncio.all_tasks() == before, "nothing of it runs"
    return refused.value


async def execute(url: str, *statements: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


async def sessions(url: str) -> int:
    connection = await asyncpg.connect(url)
    try:
        others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        return int(await connection.fetchval(f"{others} AND pid <> pg_backend_pid()"))
    finally:
        await connection.close()


async def test_server_that_a_crash_may_damage_is_refused(tmp_path: Path) -> None:
    for name in ("fsync", "full_page_writes"):
        server = had("postgres", lambda name=name: postgres.start(**{name: "off"}))
        try:
            error = await refusal(tmp_path, server.url)
            assert isinstance(error, BadSetting)
            assert f"{name} = off" in error.message and "switch it on" in error.message
        finally:
            server.stop()


async def test_pooler_in_transaction_mode_is_refused(
    pooler: Callable[..., Server], tmp_path: Path
) -> None:
    error = await refusal(tmp_path, pooler("transaction").url)
    assert isinstance(error, BadSetting) and "set pool_mode = session" in error.message


async def test_user_without_rights_is_refused_with_the_right_to_grant(
    postgres_server: Server, tmp_path: Path
) -> None:
    url = await new_database(postgres_server, "no_rights")
    weak = url.replace("postgres@", "weak_node@")
    await execute(url, "DROP ROLE IF EXISTS weak_node", "CREATE ROLE weak_node LOGIN")
    try:
        error = await refusal(tmp_path, weak)
        assert isinstance(error, BadSetting) and "GRANT CREATE ON DATABASE" in error.message
        async with PostgresStore(PostgresStoreSettings(url)):
            pass
        error = await refusal(tmp_path, weak)
        assert isinstance(error, BadSetting)
        assert "grant this role all rights on holdfast_chats" in error.message
    finally:
        await execute(url, "DROP ROLE weak_node")


async def test_schema_of_somebody_else_is_refused_and_not_touched(
    postgres_server: Server, tmp_path: Path
) -> None:
    url = await new_database(postgres_server, "foreign_schema")
    await execute(url, "CREATE SCHEMA holdfast_chats", "CREATE TABLE holdfast_chats.chat ()")
    error = await refusal(tmp_path, url)
    assert isinstance(error, BadSetting) and "is not Holdfast's" in error.message
    await execute(url, "SELECT FROM holdfast_chats.chat")


async def test_schema_that_is_too_new_is_refused(postgres_server: Server, tmp_path: Path) -> None:
    url = await new_database(postgres_server, "newer_schema")
    async with PostgresStore(PostgresStoreSettings(url)):
        pass
    await execute(url, "INSERT INTO holdfast_chats.schema_version VALUES (99)")
    error = await refusal(tmp_path, url)
    assert isinstance(error, StateCorrupted) and "version 99" in error.message
    assert "upgrade" in error.message


async def test_lossless_failover_without_a_named_standby_is_refused(
    postgres_server: Server, tmp_path: Path
) -> None:
    url = await new_database(postgres_server, "no_standby")
    error = await refusal(tmp_path, url, cluster__failover="lossless")
    assert isinstance(error, BadSetting) and "set synchronous_standby_names" in error.message


async def test_standby_and_database_that_is_not_there_are_refused(
    postgres_server: Server, tmp_path: Path
) -> None:
    error = await refusal(tmp_path, f"postgresql://postgres@127.0.0.1:{free_port()}/x")
    assert isinstance(error, Unavailable) and "cannot connect to PostgreSQL" in error.message
    error = await refusal(tmp_path, postgres_server.url.removesuffix("postgres") + "nowhere")
    assert isinstance(error, BadSetting) and '"nowhere" does not exist' in error.message
    replica = had("postgres", lambda: postgres.standby(postgres_server))
    try:
        error = await refusal(tmp_path, replica.url)
        assert isinstance(error, Unavailable) and "connect to the primary" in error.message
    finally:
        replica.stop()


async def test_tls_that_cannot_be_is_explained(
    postgres_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # no root certificate is there
    monkeypatch.delenv("PGSSLROOTCERT", raising=False)
    url = postgres_server.url.replace("postgres@", "postgres:S3CRET@", 1)
    error = await refusal(tmp_path, f"{url}?sslmode=verify-full")
    assert isinstance(error, BadSetting) and "add &sslrootcert=FILE" in error.message
    assert "root.crt" in error.message and "S3CRET" not in error.message
    error = await refusal(tmp_path, f"{url}?sslmode=require")
    assert isinstance(error, Unavailable) and "rejected SSL upgrade" in error.message
    assert "S3CRET" not in error.message


async def test_database_that_is_dropped_under_a_node_is_unavailable(
    postgres_server: Server,
) -> None:
    url = await new_database(postgres_server, "dropped")
    server = ChatsServer(PostgresStoreSettings(url))
    (await server.prepare()).terminate()
    await execute(postgres_server.url, "DROP DATABASE dropped WITH (FORCE)")
    with pytest.raises(Unavailable, match='"dropped" does not exist; try again'):
        await server.connect()


async def test_jobs_of_another_cluster_are_refused(postgres_server: Server, tmp_path: Path) -> None:
    """Two clusters whose jobs were in one database would run each other's."""
    ours, theirs = [
        await new_database(postgres_server, name) for name in ("jobs_ours", "jobs_theirs")
    ]
    keys = tmp_path / "token.keys"
    await asyncio.to_thread(keys.write_text, "k" * 32)
    await asyncio.to_thread(keys.chmod, 0o600)
    first = {
        "cluster.postgres": theirs,
        "access.tokens.secret_file": str(keys),
        "server.state_dir": str(tmp_path / "first"),
        "server.port": free_port(),
    }
    async with running(load(None, {}, first)):
        pass
    error = await refusal(tmp_path, ours, work__url=theirs)
    assert isinstance(error, BadSetting), error
    assert await sessions(ours) == 0, "what it had opened is closed"


async def test_redis_that_answers_garbage_is_refused(
    postgres_server: Server, tmp_path: Path
) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    url = await new_database(postgres_server, "garbage")
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        error = await refusal(tmp_path, url, cluster__redis=f"redis://127.0.0.1:{port}/0")
    assert isinstance(error, BadSetting)
    assert "cluster.redis: what answers there is no Redis: correct host and port" in error.message


class _Old:
    """A connection to a server of another version."""

    def __init__(self, major: int) -> None:
        self.major = major

    def get_server_version(self) -> _Old:
        return self


async def test_postgres_that_is_too_old_is_refused() -> None:
    server = ChatsServer(PostgresStoreSettings("postgresql://nowhere"))
    with pytest.raises(BadSetting, match="PostgreSQL 14 is too old: the chats need 15 or newer"):
        await server._prepare(_Old(14), "")
    with pytest.raises(BadSetting, match="PostgreSQL 12 is too old: work needs 13 or newer"):
        await migrate_jobs(_Old(12))
