"""Registry and bus behind Sentinel; a node that reaches PostgreSQL and Redis by TLS, with
passwords in files.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest
from program import Program
from registry_rig import connect
from scripted_durability import ANNA, BELA
from sentinel_service import SentinelService
from structlog.testing import capture_logs
from tls import certificate
from work_rigs import until

from engines import Server, free_port, postgres
from engines import redis as redis_engine
from engines.fixtures import had
from holdfast.cli.rest import RestClient
from holdfast.errors import HoldfastError
from holdfast.fanout.bus.contract import KeysChanged, Notification
from holdfast.fanout.bus.redis import RedisBus
from holdfast.fanout.registry.redis import RedisRegistry

PASSWORD = "S3CRET-of-all"


@pytest.fixture
def service() -> Iterator[SentinelService]:
    started = list[Server]()
    try:
        yield had("redis", lambda: SentinelService(started))
    finally:
        for server in reversed(started):
            server.stop()


@asynccontextmanager
async def running(bus: RedisBus) -> AsyncIterator[list[Notification]]:
    """What another node's bus hears."""
    heard: list[Notification] = []
    bus.subscribe(heard.append)
    task = asyncio.create_task(bus.run())
    try:
        yield heard
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def reaches(one: RedisBus, heard: list[Notification]) -> None:
    """Return when a notification arrives: until it is connected, they are lost."""
    heard.clear()

    async def is_heard() -> bool:
        one.publish(KeysChanged())
        await asyncio.sleep(0.05)
        return bool(heard)

    await until(is_heard)


async def test_registry_and_bus_follow_a_sentinel_failover(service: SentinelService) -> None:
    registry = RedisRegistry(service.url)
    one, two = RedisBus(service.url, "one"), RedisBus(service.url, "two")
    with capture_logs() as lines:
        async with asyncio.timeout(60), running(one), running(two) as heard:
            await registry.check()
            await connect(registry, "east", ANNA)
            await reaches(one, heard)
            await asyncio.to_thread(service.replicated)
            service.primary.process.kill()
            service.primary.process.wait()

            async def is_registered() -> bool:
                try:
                    await connect(registry, "east", BELA)
                except HoldfastError:
                    return False
                return True

            await until(is_registered)
            found = await registry.gateways_of([ANNA, BELA])
            assert found == {"east": {ANNA, BELA}}, "the replica had what was registered"
            await reaches(one, heard)
        await registry.close()
    assert "S3CRET" not in repr(lines)


def encrypted_postgres(folder: Path) -> tuple[Server, Path]:
    """A PostgreSQL that takes only TLS and a password, and its certificate."""
    cert, key = certificate(folder)
    server = had("postgres", postgres.start)
    for file in (cert, key):
        (server.folder / "data" / file.name).write_bytes(file.read_bytes())
    postgres.own_files(*(server.folder / "data" / file.name for file in (cert, key)))
    asyncio.run(_require_tls(server))
    return server, cert


async def _require_tls(server: Server) -> None:
    connection = await asyncpg.connect(server.url)
    await connection.execute(f"CREATE ROLE holdfast LOGIN PASSWORD '{PASSWORD}'")
    await connection.execute("CREATE DATABASE holdfast OWNER holdfast")
    rules = (
        "hostssl all holdfast 127.0.0.1/32 scram-sha-256\nhost all postgres 127.0.0.1/32 trust\n"
    )
    (server.folder / "data" / "pg_hba.conf").write_text(rules)
    for name, value in (("ssl_cert_file", "cert.pem"), ("ssl_key_file", "key.pem"), ("ssl", "on")):
        await connection.execute(f"ALTER SYSTEM SET {name} = '{value}'")
    await connection.execute("SELECT pg_reload_conf()")
    await until(lambda: connection.fetchval("SELECT current_setting('ssl') = 'on'"))
    await connection.close()


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[tuple[Server, int, Path]]:
    """PostgreSQL, the TLS port of a Redis with a password, and their certificate."""
    database, cert = encrypted_postgres(tmp_path)
    port = free_port()
    tls = {"tls-cert-file": str(cert), "tls-key-file": str(tmp_path / "key.pem")}
    tls |= {"tls-ca-cert-file": str(cert), "tls-auth-clients": "no", "tls-port": str(port)}
    shared = had("redis", lambda: redis_engine.start(requirepass=PASSWORD, **tls))
    yield database, port, cert
    database.stop()
    shared.stop()


def private(file: Path, text: str) -> Path:
    file.write_text(text)
    file.chmod(0o600)
    return file


def test_node_reaches_both_engines_by_tls_with_passwords_in_files(
    encrypted: tuple[Server, int, Path], tmp_path: Path
) -> None:
    """It is no superuser of PostgreSQL: it owns its database."""
    database, redis_port, cert = encrypted
    passfile = private(tmp_path / "pgpass", f"*:*:*:holdfast:{PASSWORD}\n")
    keys = private(tmp_path / "keys", "k" * 32)
    password = private(tmp_path / "redis.password", f"{PASSWORD}\n")
    address = f"127.0.0.1:{database.port}/holdfast"
    url = f"postgresql://holdfast@{address}?sslmode=verify-full&sslrootcert={cert}"
    config = tmp_path / "holdfast.toml"
    program = Program(tmp_path / "state")

    def write(postgres_url: str, redis_url: str) -> None:
        config.write_text(
            f'[cluster]\npostgres = "{postgres_url}"\nredis = "{redis_url}"\n'
            f'[access.tokens]\nsecret_file = "{keys}"\n'
        )

    redis_url = f"rediss://127.0.0.1:{redis_port}/0?ssl_ca_certs={cert}&password_file={password}"
    write(f"{url}&passfile={passfile}", redis_url)
    try:
        program.serve("-c", str(config))
        key = json.loads((program.state_dir / "secrets.json").read_text())["admin_key"]
        rest = RestClient(program.url, key)
        shown = rest.get("/admin/cluster")
        assert shown["registry"]["state"] == "up" and shown["database"]["system"]
        assert PASSWORD not in json.dumps([shown, rest.get("/admin/status")])
    finally:
        program.stop()
    assert PASSWORD not in (tmp_path / "serve.log").read_text()

    def refused(postgres_url: str, redis_url: str) -> str:
        write(postgres_url, redis_url)
        done = program.run_process("serve", "-c", str(config))
        assert done.returncode != 0
        assert PASSWORD not in done.stdout + done.stderr
        return done.stderr

    good = f"{url}&passfile={passfile}"
    untrusted = f"postgresql://holdfast@{address}?sslmode=verify-full&passfile={passfile}"
    os.environ["PGSSLROOTCERT"] = str(private(tmp_path / "other.pem", other_authority(tmp_path)))
    try:
        assert "cannot connect to PostgreSQL" in refused(untrusted, redis_url)
    finally:
        del os.environ["PGSSLROOTCERT"]
    nobody = private(tmp_path / "nobody", "wrong\n")
    assert "password authentication failed" in refused(url.replace("@", f":{'x' * 8}@"), redis_url)
    wrong = redis_url.replace(str(password), str(nobody))
    assert "Redis refuses the user or the password: correct the URL" in refused(good, wrong)
    unread = redis_url.replace(str(password), str(tmp_path / "none"))
    assert "with a password of Redis: " in refused(good, unread)
    unknown = f"rediss://127.0.0.1:{redis_port}/0?password_file={password}"
    assert "name its authority by ?ssl_ca_certs=" in refused(good, unknown)


def other_authority(folder: Path) -> str:
    """A certificate that has signed nothing here."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    return certificate(elsewhere)[0].read_text()
