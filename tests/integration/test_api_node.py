"""REST against a whole node: real sockets, real SQLite."""

from __future__ import annotations

import asyncio
import errno
import os
import shlex
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from credentials import admin_key_of
from program import patched_environment
from structlog.testing import capture_logs
from typer.testing import CliRunner

from holdfast import telemetry
from holdfast.access.principal import USER_SCOPES
from holdfast.api.deps import NodeStatus
from holdfast.cli.app import app
from holdfast.cli.context import CliContext, settings_of
from holdfast.drivers.files import default_state_dir
from holdfast.errors import Unavailable
from holdfast.eventlog.sqlite import SqliteEventLog
from holdfast.message import User
from holdfast.node.banner import banner_lines
from holdfast.node.lifecycle import running
from holdfast.node.node import Node
from holdfast.settings import ServerSettings, Settings, load
from holdfast.store.commands import Command, CommandResult
from holdfast.store.sqlite import SqliteStore
from holdfast.streaming.reply import ReplyBegin
from holdfast.streaming.reply_log.sqlite import RepliesFile
from holdfast.streaming.usage_store.contract import RunUsage, UsageKey, UsageQuery
from holdfast.work.job import Failure, JobDraft, Reason
from holdfast.work.sqlite import SqliteWork


@asynccontextmanager
async def serving_node(
    state: Path, settings: Settings | None = None
) -> AsyncIterator[tuple[Node, httpx.AsyncClient]]:
    """A node on a free port of this machine, and a client of it."""
    server = ServerSettings(port=0, state_dir=str(state))
    async with (
        running(replace(settings or Settings(), server=server)) as node,
        httpx.AsyncClient(base_url=node.url) as client,
    ):
        yield node, client


def bearer(credential: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {credential}"} | {
        k.replace("_", "-"): v for k, v in more.items()
    }


async def tenant_key(node: Node, client: httpx.AsyncClient) -> str:
    body = {"kind": "tenant", "tenant": "default", "label": "backend", "reason": "test"}
    answer = await client.post(
        "/admin/keys",
        json=body,
        headers=bearer(admin_key_of(node)),
    )
    assert answer.status_code == 201, answer.text
    return str(answer.json()["secret"])


async def test_a_backend_makes_a_chat_and_its_users_talk_and_all_of_it_survives_a_restart(
    tmp_path: Path,
) -> None:
    async with serving_node(tmp_path / "state") as (node, client):
        key = await tenant_key(node, client)
        made = await client.post("/v1/chats", json={"name": "Lobby", "members": ["bob"]},
                                 headers=bearer(key, X_Act_As="alice"))  # fmt: skip
        chat = made.json()["chat"]["chat_id"]
        token = (
            await client.post("/v1/tokens", json={"user_id": "bob"}, headers=bearer(key))
        ).json()["token"]
        sends = [
            client.post(f"/v1/chats/{chat}/messages", json={"content": f"m{n}"},
                        headers=bearer(token, Idempotency_Key=f"k{n}"))
            for n in range(20)
        ]  # fmt: skip
        acks = [answer.json() for answer in await asyncio.gather(*sends)]
        assert sorted(ack["sequence"] for ack in acks) == list(range(1, 21))

    async with serving_node(tmp_path / "state") as (_, client):
        alice = bearer(key, X_Act_As="alice")
        page = (await client.get(f"/v1/chats/{chat}/messages", headers=alice)).json()
        assert sorted(m["content"] for m in page["messages"]) == sorted(f"m{n}" for n in range(20))
        bob = bearer(key, X_Act_As="bob", Idempotency_Key="k7")
        retried = await client.post(
            f"/v1/chats/{chat}/messages", json={"content": "m7"}, headers=bob
        )
        assert retried.json()["deduplicated"] is True
        listed = (await client.get("/v1/chats", headers=alice)).json()["chats"]
        assert (listed[0]["title"], listed[0]["chat"]["head"]) == ("Lobby", 20)


async def test_an_operator_sees_health_status_metrics_and_audit_and_takes_a_backup(
    tmp_path: Path,
) -> None:
    def look_at_backup(answer: dict[str, Any]) -> None:
        backup = Path(answer["path"])
        assert (
            sum((backup / file["name"]).stat().st_size for file in answer["files"])
            == answer["size_bytes"]
            > 0
        )
        assert {file["name"] for file in answer["files"]} >= {
            "chats.db",
            "work.db",
            "webhooks.db",
            "limits.db",
            "replies.db",
        }
        assert not (backup / "secrets.json").exists()
        assert (tmp_path / "state").resolve() in backup.resolve().parents
        assert not stat.S_IMODE(backup.parent.stat().st_mode) & 0o077

    async with serving_node(tmp_path / "state") as (node, client):
        admin = bearer(admin_key_of(node))
        assert (await client.get("/health/ready")).json() == {"status": "ready"}
        assert (await client.get("/health/ready", headers=admin)).json()["dependencies"][
            "store"
        ] == "up"
        assert (await client.get("/admin/status", headers=admin)).json()["ready"] is True
        assert "holdfast_api_requests_total" in (await client.get("/metrics", headers=admin)).text
        assert (await client.get("/metrics")).status_code == 401
        taken = await client.post("/admin/backup", json={"reason": "nightly"}, headers=admin)
        look_at_backup(taken.json())
        records = (await client.get("/admin/audit", headers=admin)).json()["records"]
        assert [(r["action"], r["reason"]) for r in records] == [("backup", "nightly")]


async def test_a_backup_without_room_says_so_leaves_nothing_and_writes_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Path, target: Path, progress: object) -> None:
        target.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr("holdfast.drivers.sqlite.backup.copy_file", full)
    with capture_logs() as lines:
        async with serving_node(tmp_path / "state") as (node, client):
            answer = await client.post(
                "/admin/backup", json={"reason": "nightly"}, headers=bearer(admin_key_of(node))
            )
            error = answer.json()["error"]
            shown = (answer.status_code, error["code"], error["outcome"])
            assert shown == (507, "INSUFFICIENT_STORAGE", "rejected")
            assert "No space left on device; make room" in error["message"]
            assert not [*(tmp_path / "state" / "backups").iterdir()]
    [failed] = [line for line in lines if line["event"] == "api.request_failed"]
    assert not failed["exc_info"] and "make room" in failed["error"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_the_commands_that_a_start_prints_work_as_they_are_printed(
    host: str, tmp_path: Path
) -> None:
    settings = Settings(
        server=ServerSettings(host=host, port=0, state_dir=str(tmp_path / "a state"))
    )
    async with running(settings) as node:
        lines = list(banner_lines(node.settings))
        start = next(i for i, line in enumerate(lines) if line.startswith("  try "))
        printed = [
            line[len("  try       ") :].partition("    (")[0] for line in lines[start : start + 3]
        ]
        create, open_, token = [shlex.split(command)[1:] for command in printed]
        for command in (create, token, [*open_, "--json"]):
            done = await asyncio.to_thread(CliRunner().invoke, app, command)
            assert done.exit_code == 0, (command, done.output)


def test_the_commands_name_a_state_directory_only_where_they_would_not_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state_dir() == tmp_path / "holdfast"
    assert not any("--state-dir" in line for line in banner_lines(settings_of(None)))
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    assert default_state_dir() == Path("~/.local/state/holdfast").expanduser()
    elsewhere = settings_of(None, {"server.state_dir": str(tmp_path / "elsewhere")})
    assert (
        sum(f"--state-dir {tmp_path / 'elsewhere'}" in line for line in banner_lines(elsewhere))
        == 3
    )
    named = settings_of(None, {"server.state_dir": "~/.local/state/holdfast"})
    assert not any("--state-dir" in line for line in banner_lines(named))


def test_a_state_directory_that_is_named_is_taken_whatever_the_default_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    named = settings_of(None, {"server.state_dir": "~/.local/state/holdfast"})
    assert named.server.state_path == Path("~/.local/state/holdfast").expanduser()
    assert sum("--state-dir" in line for line in banner_lines(named)) == 3


SAID = [
    {"HOLDFAST_SERVER__PORT": "9000"},
    {"HOLDFAST_SERVER__HOST": "::1", "HOLDFAST_PORT": "9000"},
    {"HOLDFAST_SERVER__STATE_DIR": "/srv/hf"},
    {"HOLDFAST_STATE_DIR": "/srv/hf", "HOLDFAST_HOST": "localhost"},
    {"XDG_STATE_HOME": "/srv"},
    {},
]


@pytest.mark.parametrize("environment", SAID, ids=lambda said: ",".join(said) or "nothing")
def test_every_command_goes_where_a_server_of_the_same_environment_is(
    environment: dict[str, str],
) -> None:
    with patched_environment(environment):
        server = settings_of(None).server
        given = (
            Path(environment["HOLDFAST_STATE_DIR"]) if "HOLDFAST_STATE_DIR" in environment else None
        )
        reach = CliContext(state_dir=given)  # as the option's own variable gives it
        assert (reach.address, reach.state_path) == (server.url, server.state_path)


async def test_what_http_itself_can_get_wrong_is_answered_in_our_shape(tmp_path: Path) -> None:
    async with serving_node(tmp_path / "state") as (node, client):
        token = bearer(node.tokens.mint(User("default", "alice"), 60, USER_SCOPES))
        large = await client.post(
            "/v1/chats",
            content=b" " * 70_000,
            headers={**token, "Content-Type": "application/json"},
        )
        assert large.status_code == 413 and large.json()["error"]["code"] == "MESSAGE_TOO_LARGE"
        head = await client.head("/v1/chats", headers=token)
        assert head.status_code == 200 and head.content == b""
        upgrade = await client.get("/v1/ws", headers=token)
        assert upgrade.status_code == 426 and upgrade.json()["error"]["code"] == "INVALID_MESSAGE"
        missing = await client.get("/v1/../v1/nothing")
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "NOT_FOUND"
        assert "server" not in missing.headers


async def test_client_that_disconnects_within_its_request_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    async with serving_node(tmp_path / "state") as (node, client):
        token = node.tokens.mint(User("default", "alice"), 60, USER_SCOPES)
        server = node.settings.server
        _, writer = await asyncio.open_connection(server.host, server.port)
        head = f"POST /v1/chats HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        writer.write(
            f'{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{"name":'.encode()
        )
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await client.get("/v1/chats", headers=bearer(token))).json()["chats"] == []
        metrics = (await client.get("/metrics", headers=bearer(admin_key_of(node)))).text
        assert 'endpoint="create_chat",status="500"' not in metrics


async def test_an_operator_says_how_many_changes_may_be_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, begun, may_end = SqliteStore.change, asyncio.Event(), asyncio.Event()

    async def later(self: SqliteStore, command: Command) -> CommandResult:
        begun.set()
        await may_end.wait()
        return await change(self, command)

    async with serving_node(
        tmp_path / "state", load(None, {"HOLDFAST_DURABILITY__CHANGES__MAX_AT_ONCE": "1"}, {})
    ) as (node, client):
        monkeypatch.setattr(SqliteStore, "change", later)
        token = bearer(node.tokens.mint(User("default", "alice"), 60, USER_SCOPES))
        first = asyncio.create_task(client.post("/v1/chats", json={"name": "one"}, headers=token))
        await begun.wait()
        second = await client.post("/v1/chats", json={"name": "two"}, headers=token)
        assert (second.status_code, second.json()["error"]["details"]) == (503, {"limit": 1})
        may_end.set()
        assert (await first).status_code == 201


async def test_status_is_answered_while_the_log_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unavailable(self: SqliteEventLog, after: object) -> int:
        raise Unavailable("the server's files are damaged")

    async with serving_node(tmp_path / "state") as (node, client):
        monkeypatch.setattr(SqliteEventLog, "lag", unavailable)
        answer = await client.get("/admin/status", headers=bearer(admin_key_of(node)))
        assert (answer.status_code, answer.json()["fanout_lag"]) == (200, None)


async def test_status_counts_dead_letters_of_jobs_by_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unavailable(self: SqliteWork) -> dict[Reason | None, int]:
        raise Unavailable("the server's files are damaged")

    async with serving_node(tmp_path / "state") as (node, client):
        jobs, admin = node._work.jobs, bearer(admin_key_of(node))
        seqs = await jobs.enqueue([JobDraft("later", b"{}", delay_seconds=3600)] * 3)
        expired = Failure(Reason.TIMEOUT_EXCEEDED, "Expired", "it waited too long")
        await jobs.bury(seqs[:2], by="holdfast", why="too old", failure=expired)
        await jobs.bury(seqs[2:], by="ann", why="not needed")
        answer = await client.get("/admin/status", headers=admin)
        status = answer.json()
        assert list(status) == list(NodeStatus.__struct_fields__)
        msgspec.json.decode(answer.content, type=NodeStatus)
        counts = {"timeout_exceeded": 2, "buried": 1}
        assert status["dead_by_reason"] == {"fanout": {}, "jobs": counts}
        assert status["unknown"] == []

        monkeypatch.setattr(SqliteWork, "dead_counts", unavailable)
        status = (await client.get("/admin/status", headers=admin)).json()
        assert status["dead_by_reason"] == {"fanout": {}, "jobs": None}
        assert status["unknown"] == ["dead_letters_of_jobs"]


async def test_status_names_the_full_disk_of_replies_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(self: RepliesFile, work: object) -> None:
        raise Unavailable("the disk is full")

    async with serving_node(tmp_path / "state") as (node, client), asyncio.timeout(20):

        async def trouble_after_a_reply() -> dict[str, str]:
            headers = bearer(node.tokens.mint(User("default", "alice"), 60, USER_SCOPES))
            asked = {"model": "scripted", "input": "hi"}
            answer = await client.post("/v1/responses", json=asked, headers=headers)
            assert answer.status_code == 200, "a reply is made without its log"
            status = await client.get("/admin/status", headers=bearer(admin_key_of(node)))
            return dict(status.json()["trouble"])

        with monkeypatch.context() as failing:
            failing.setattr(RepliesFile, "transact", full)
            full_disk = {"replies": "the disk is full", "usage": "the disk is full"}
            assert await trouble_after_a_reply() == full_disk
        while await trouble_after_a_reply():
            pass


async def test_node_whose_ingest_ended_by_a_defect_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def group_persisted(sends: int, seconds: float) -> None:
        raise RuntimeError("a defect")

    async with serving_node(tmp_path / "state") as (node, client):
        token = node.tokens.mint(User("default", "alice"), 60, USER_SCOPES)
        made = await client.post("/v1/chats", json={"name": "lobby"}, headers=bearer(token))
        monkeypatch.setattr(telemetry, "group_persisted", group_persisted)
        sent = client.post(
            f"/v1/chats/{made.json()['chat']['chat_id']}/messages",
            json={"content": "x"},
            headers=bearer(token, Idempotency_Key="k"),
        )
        await asyncio.gather(asyncio.wait_for(node.broken.wait(), 5), sent)


async def test_erased_user_leaves_no_reply_and_no_name_in_the_usage(tmp_path: Path) -> None:
    async with serving_node(tmp_path / "state") as (node, client):
        replies, usage = node.engines.replies, node.engines.usage
        for user in ("dora", "bob"):
            begin = ReplyBegin("default", "user", user, "native", "native", "m", "n", 1.0)
            await replies.begin(f"reply_{user}", begin)
            key = UsageKey("2026-01-01", "default", user, "m", "p")
            await usage.count([RunUsage(user, key, 3, 4, False)])
        answer = await client.post(
            "/admin/erase",
            json={"tenant": "default", "user_id": "dora", "reason": "test"},
            headers=bearer(admin_key_of(node)),
        )
        assert answer.status_code == 200, answer.text
        assert await replies.read("reply_dora", None, 10) is None
        assert await replies.read("reply_bob", None, 10) is not None
        rows = await usage.rows(UsageQuery("2026-01-01", "2026-01-01"))
        assert [(row.key.user, row.prompt_tokens) for row in rows] == [("", 3), ("bob", 3)]
