"""A whole node: a message goes in by REST and comes out as a signed webhook; the
command line sees and repairs jobs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from credentials import admin_key_of
from typer.testing import CliRunner
from work_rigs import postgres_work

from engines import Server as Engine
from engines import postgres
from engines.fixtures import had
from holdfast.access.principal import USER_SCOPES
from holdfast.cli.app import app
from holdfast.cli.jobs import jobs
from holdfast.cli.operations import alarms
from holdfast.cli.webhooks import webhooks
from holdfast.errors import BadSetting
from holdfast.message import User
from holdfast.node.lifecycle import running
from holdfast.node.node import Node
from holdfast.settings import ServerSettings, Settings
from holdfast.webhooks.delivery import WebhookSettings
from holdfast.webhooks.parts import WorkSettings
from holdfast.webhooks.signature import verify


async def until(condition: Callable[[], Any]) -> None:
    """Poll other threads and sockets."""
    async with asyncio.timeout(40):
        while True:
            result = condition()
            if await result if asyncio.iscoroutine(result) else result:
                return
            await asyncio.sleep(0.02)


class Command:
    """The command line against a running node, in a thread of its own. What succeeds
    prints JSON and nothing else.
    """

    def __init__(self, node: Node) -> None:
        self.used: set[tuple[str, str]] = set()
        self._env = {
            "HOLDFAST_URL": node.url,
            "HOLDFAST_TOKEN": admin_key_of(node),
        }

    async def __call__(self, *words: str, code: int = 0) -> Any:
        result = await asyncio.to_thread(CliRunner().invoke, app, ["--json", *words], env=self._env)
        assert result.exit_code == code, result.output
        # The server logs in this process too; its lines begin with a date.
        said = "\n".join(line for line in result.stdout.splitlines() if not line[:4].isdigit())
        if code:
            return said
        self.used.add((words[0], words[1]))
        return json.loads(said)


async def test_second_server_of_a_job_store_is_refused(
    tmp_path: Path, postgres_server: Engine
) -> None:
    """Each has its own endpoints and log: together they would lose webhooks."""

    def settings(name: str) -> Settings:
        server = ServerSettings(port=0, state_dir=str(tmp_path / name), node_id=name)
        return Settings(server=server, work=WorkSettings(url=postgres_server.url))

    async with asyncio.timeout(120), postgres_work(postgres_server.url):
        async with running(settings("first")):
            with pytest.raises(BadSetting, match="belong to another Holdfast server"):
                async with running(settings("second")):
                    pass
        async with running(settings("first")):
            pass


async def test_node_serves_chats_during_an_outage_of_the_job_database(
    tmp_path: Path,
) -> None:
    """A node that restarts during the outage serves chats without its jobs."""

    engine = had("postgres", postgres.start)
    try:
        async with asyncio.timeout(120):
            calls = list[str]()

            async def take(request: web.Request) -> web.Response:
                calls.append((await request.json())["data"]["content"])
                return web.Response()

            receiver = web.Application()
            receiver.router.add_post("/hook", take)
            runner = web.AppRunner(receiver)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            hook = {
                "url": f"http://127.0.0.1:{runner.addresses[0][1]}/hook",
                "tenant": "acme",
                "reason": "test",
            }
            settings = Settings(
                server=ServerSettings(port=0, state_dir=str(tmp_path / "state")),
                work=WorkSettings(url=engine.url, webhooks=WebhookSettings(private_allowed=True)),
            )
            async with (
                running(settings) as node,
                httpx.AsyncClient(base_url=node.url, headers=_admin(node)) as admin,
            ):
                await until(lambda: _jobs_up(admin))
                assert (await admin.post("/admin/webhooks", json=hook)).status_code == 201
                chat = await _made_chat(node)
            postgres.kill(engine)
            async with (
                running(settings) as node,
                httpx.AsyncClient(base_url=node.url, headers=_admin(node)) as admin,
            ):
                await _say(node, chat, "during the outage")
                assert (await admin.get("/admin/jobs")).status_code == 503
                assert (await admin.post("/admin/webhooks", json=hook)).status_code == 503
                ready = await admin.get("/health/ready")
                assert (ready.status_code, ready.json()["dependencies"]["jobs"]) == (200, "down")
                assert (await admin.get("/admin/status")).json()["dependencies"]["jobs"] == "down"
                back = postgres.again(engine)
                try:
                    await until(lambda: calls == ["during the outage"])
                    await until(lambda: _answers(admin, "/admin/jobs"))
                    assert (await admin.post("/admin/webhooks", json=hook)).status_code == 201
                finally:
                    postgres.kill(back)
            await runner.cleanup()
    finally:
        engine.stop()


def _admin(node: Node) -> dict[str, str]:
    return {"Authorization": f"Bearer {admin_key_of(node)}"}


async def _jobs_up(client: httpx.AsyncClient) -> bool:
    return bool((await client.get("/health/ready")).json()["dependencies"]["jobs"] == "up")


async def _answers(client: httpx.AsyncClient, path: str) -> bool:
    return (await client.get(path)).status_code == 200


async def _as_alice(node: Node, path: str, body: dict[str, str]) -> Any:
    headers = {
        "Authorization": f"Bearer {node.tokens.mint(User('acme', 'alice'), 3600, USER_SCOPES)}",
        "Idempotency-Key": "k1",
    }
    async with httpx.AsyncClient(base_url=node.url, headers=headers) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def _made_chat(node: Node) -> str:
    return str((await _as_alice(node, "/v1/chats", {"name": "lobby"}))["chat"]["chat_id"])


async def _say(node: Node, chat: str, text: str) -> None:
    await _as_alice(node, f"/v1/chats/{chat}/messages", {"content": text})


@pytest.mark.parametrize(
    "wrong", ["postgresql://127.0.0.1:notaport/x", "postgresql://127.0.0.1/x?sslmode=maybe"]
)
async def test_invalid_work_url_is_refused_at_startup(tmp_path: Path, wrong: str) -> None:
    server = ServerSettings(port=0, state_dir=str(tmp_path / "state"))
    with pytest.raises((BadSetting, ValueError), match=r"with this URL|url is no URL"):
        async with running(Settings(server=server, work=WorkSettings(url=wrong))):
            pass


@pytest.mark.covers("003 stuck in a retry loop: diagnosis")
async def test_message_is_sent_as_signed_webhook_and_failures_are_repaired_by_cli(
    tmp_path: Path,
) -> None:
    calls: list[tuple[dict[str, str], bytes]] = []
    status = 200

    async def take(request: web.Request) -> web.Response:
        calls.append(
            (
                {name.lower(): value for name, value in request.headers.items()},
                await request.read(),
            )
        )
        return web.Response(status=status, text="not now")

    receiver = web.Application()
    receiver.router.add_post("/hook", take)
    runner = web.AppRunner(receiver)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    hook = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    settings = Settings(
        server=ServerSettings(port=0, state_dir=str(tmp_path / "state")),
        work=WorkSettings(webhooks=WebhookSettings(private_allowed=True)),
    )
    async with running(settings) as node, httpx.AsyncClient(base_url=node.url) as client:
        command = Command(node)
        made = await command("webhooks", "add", hook, "--tenant", "acme")
        token = node.tokens.mint(User("acme", "alice"), 3600, USER_SCOPES)
        client.headers["Authorization"] = f"Bearer {token}"
        chat = (await client.post("/v1/chats", json={"name": "lobby"})).json()["chat"]["chat_id"]

        async def say(text: str) -> None:
            body = {"content": text}
            answer = await client.post(
                f"/v1/chats/{chat}/messages",
                json=body,
                headers={"Idempotency-Key": text.replace(" ", "-")},
            )
            assert answer.status_code == 201, answer.text

        await say("hello there")
        await until(lambda: len(calls) == 1)
        headers, body = calls[0]
        verify(made["secret"], headers, time.time(), body)
        assert json.loads(body)["data"]["content"] == "hello there"

        status = 500
        await say("first")
        await say("second")

        async def blocked() -> bool:
            return bool(await command("jobs", "streams"))

        async def one_waits() -> bool:
            return [stream["waiting"] for stream in await command("jobs", "streams")] == [1]

        await until(one_waits)
        said = (await client.get(f"/v1/chats/{chat}/messages")).json()["messages"]
        (second,) = [message for message in said if message["content"] == "second"]
        redacted = await client.delete(f"/v1/chats/{chat}/messages/{second['sequence']}")
        assert redacted.status_code == 200, redacted.text
        (stream,) = await command("jobs", "streams")
        assert stream["head_reason"] == "transport_unavailable"
        (head,) = await command("jobs", "ls", "--state", "retry")
        assert head["seq"] == stream["head"]
        shown = await command("jobs", "show", str(head["seq"]))
        assert "not now" in shown["error"]
        assert (await command("jobs", "stats"))["by_state"]["retry"] == 1
        assert await command("jobs", "breakers") == []

        status = 200
        calls.clear()
        seq, name = str(head["seq"]), stream["stream"]
        assert await command("jobs", "park", seq, "--reason", "look first") == {"count": 1}
        follower = str((await command("jobs", "ls", "--stream", name))[1]["seq"])
        assert await command("jobs", "release", name, "--job", follower) == {"count": 1}
        await until(lambda: len(calls) == 1)
        assert await command(
            "jobs", "release", name, "--type", "webhook", "--through", follower
        ) == {"count": 1}
        assert await command("jobs", "retry", seq, "--now", "--reset") == {"count": 1}
        await until(lambda: len(calls) == 2)
        assert [json.loads(body)["data"]["content"] for _, body in calls] == ["", "first"]

        async def nothing_left() -> bool:
            return not await command("jobs", "ls")

        await until(nothing_left)
        log = await command("webhooks", "log", made["endpoint_id"])
        assert {entry["status"] for entry in log} == {200, 500}
        assert await command("webhooks", "test", made["endpoint_id"]) == {"count": 1}
        await until(lambda: len(calls) == 3)

        status = 500
        await say("doomed")
        await until(blocked)
        (head,) = await command("jobs", "ls", "--state", "retry")
        assert await command("jobs", "bury", str(head["seq"]), "--reason", "hopeless") == {
            "count": 1
        }
        acts = await command("jobs", "acts")
        assert {"retry", "release", "dead"} <= {act["verb"] for act in acts["acts"]}
        (dead,) = await command("jobs", "dead")
        status = 200
        assert (await command("jobs", "replay", "--type", "webhook", "--rate", "1"))["count"] == 1
        gone = await command("jobs", "replay", str(dead["seq"]), code=1)
        assert json.loads(gone) == {"count": 0, "missing": [dead["seq"]]}
        await until(lambda: json.loads(calls[-1][1])["data"].get("content") == "doomed")

        await until(nothing_left)
        status = 500
        await say("first of two")
        await say("second of two")

        await until(one_waits)
        seqs = [str(job["seq"]) for job in await command("jobs", "ls")]
        assert await command("jobs", "bury", *seqs, "--reason", "hopeless") == {"count": 2}
        await command("jobs", "discard", "--yes", code=1)
        await command("jobs", "discard", seqs[0], code=1)
        assert await command("jobs", "discard", seqs[0], "--yes") == {"count": 1, "missing": []}
        status = 200
        said_again = json.loads(await command("jobs", "replay", *seqs, "--rate", "1", code=1))
        assert said_again == {"count": 1, "missing": [int(seqs[0])]}
        await until(lambda: json.loads(calls[-1][1])["data"].get("content") == "second of two")
        await command("jobs", "release", "nowhere", "--through", "9", code=1)
        await until(nothing_left)
        calls.clear()
        off = await command("webhooks", "disable", made["endpoint_id"], "--reason", "maintenance")
        assert off["disabled"] == "by an operator: maintenance" and off["disabled_at"]
        await say("parked one")
        await say("parked two")

        async def two_wait() -> bool:
            (shown,) = await command("webhooks", "ls")
            return bool(shown["waiting"] == 2 and shown["oldest_waiting_at"])

        await until(two_wait)
        await command("webhooks", "test", made["endpoint_id"], code=1)  # it would be parked
        summary = (await client.get("/admin/status", headers=_admin(node))).json()["webhooks"]
        assert summary["endpoints"] == 1 and list(summary["parked"]) == [made["endpoint_id"]]
        assert "webhooks disabled" in alarms({"webhooks": summary})[0]
        assert not calls
        assert (await command("webhooks", "enable", made["endpoint_id"]))["disabled"] == ""
        await until(lambda: len(calls) == 2)
        assert [json.loads(body)["data"]["content"] for _, body in calls] == [
            "parked one",
            "parked two",
        ]
        assert (await command("webhooks", "rm", made["endpoint_id"]))["url"] == hook
        groups = {"jobs": jobs, "webhooks": webhooks}
        known = {
            (name, each.name)
            for name, group in groups.items()
            for each in group.registered_commands
        }
        assert command.used == known, "every one of them was seen to print JSON"

        async def counted() -> bool:
            metrics = await client.get("/metrics", headers=_admin(node))
            assert "holdfast_work_jobs_completed_total" in metrics.text
            return "holdfast_work_next_due_timestamp_seconds 0.0" in metrics.text

        await until(counted)
    await runner.cleanup()


@pytest.mark.parametrize("wrong", [{"url": "mysql://x"}, {"concurrency": 0}])
def test_bad_settings_are_refused_when_built(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        WorkSettings(**wrong)
