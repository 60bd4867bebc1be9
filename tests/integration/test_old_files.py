"""What version 0.1 wrote, this version reads: a server's state, a backup, a client's
state, saved histories (``tests/golden/written_by_0_1``).
"""

from __future__ import annotations

import asyncio
import errno
import json
import re
import shutil
import tarfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest
from aiohttp import web
from program import PATIENCE_SECONDS, Program

from holdfast.api.request import _fingerprint
from holdfast.api.routes import ENDPOINTS
from holdfast.client import Client, Message
from holdfast.limits.entry_rules import DEFAULT_RULES
from holdfast.webhooks.signature import verify

WRITTEN = Path(__file__).parents[1] / "golden" / "written_by_0_1"
EXPECTED: dict[str, Any] = json.loads((WRITTEN / "expected.json").read_text())
FINGERPRINTS: list[dict[str, Any]] = json.loads((WRITTEN / "fingerprints.json").read_text())
VERDICTS: dict[str, Any] = json.loads((WRITTEN / "verdicts.json").read_text())
GROUP, DIRECT = EXPECTED["group"], EXPECTED["direct"]
LOBBY = f"/v1/chats/{GROUP}/messages?after=0&limit=100"
CURSOR = EXPECTED["read_through"]
UNSENT = "written without a server"
SETTINGS = [f"--set={name}={value}" for name, value in EXPECTED["settings"].items()]
"""Nothing in the files is ever too old."""
WHY = {"reason": "a test"}
RULES_ADDED = {"reply:user", "reply:tenant"}
"""Default rules that came after version 0.1."""
SCOPES_ADDED = {"replies:write", "replies:read", "usage:read", "alerts:write"}
"""Scopes that came after it; a key that names no scopes has all of its kind."""

Handler = Callable[[web.Request], Awaitable[web.Response]]


class OldServer(Program):
    """This version on the old state directory."""

    def __init__(self, state_dir: Path) -> None:
        super().__init__(state_dir)
        unpack("state.tar.gz", state_dir.parent)
        secrets = json.loads((state_dir / "secrets.json").read_text())
        self._admin_key = secrets["admin_key"]

    def ask(
        self, who: str, method: str, path: str, body: Any = None, key: str = ""
    ) -> httpx.Response:
        """``who``: ``admin``, ``tenant`` (a backend), or a user for whom it acts."""
        credential = self._admin_key if who == "admin" else EXPECTED["tenant_key"]
        headers = {"Authorization": f"Bearer {credential}"}
        if who not in ("admin", "tenant"):
            headers["X-Act-As"] = who
        if key:
            headers["Idempotency-Key"] = key
        return httpx.request(method, self.url + path, json=body, headers=headers, timeout=30)

    def get(self, who: str, path: str) -> Any:
        answer = self.ask(who, "GET", path)
        assert answer.status_code == 200, f"{path}: {answer.text}"
        return answer.json()

    def mint(self, user: str) -> str:
        body = {"user_id": user, "scopes": ["chats:read", "chats:send"]}
        return str(self.ask("tenant", "POST", "/v1/tokens", body).json()["token"])


def unpack(archive: str, into: Path) -> None:
    with tarfile.open(WRITTEN / archive) as packed:
        packed.extractall(into, filter="data")


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OldServer]:
    """Shared by the tests that leave everything as it was."""
    server = OldServer(tmp_path_factory.mktemp("unchanged") / "state")
    server.serve(*SETTINGS)
    yield server
    server.stop()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OldServer]:
    server = OldServer(tmp_path / "state")
    yield server
    server.stop()


def then(who: str, path: str) -> Any:
    """What version 0.1 answered."""
    [found] = [read for read in EXPECTED["reads"] if (read["who"], read["path"]) == (who, path)]
    return found["answer"]


def stable(path: str, answer: Any) -> Any:
    """The answer without what a restart may change."""
    if path == "/admin/audit":  # each start may add a record; records and pages have more fields
        old = then("admin", path)["records"]
        new = zip(old, answer["records"][: len(old)], strict=True)
        return [{name: now[name] for name in was} for was, now in new]
    if path == "/admin/rules":
        return [rule for rule in answer["rules"] if rule["resource"] not in RULES_ADDED]
    if path == "/admin/rules/changes":
        return [c for c in answer["changes"] if c["rule"]["resource"] not in RULES_ADDED]
    if path == "/admin/keys":
        return [
            key | {"scopes": [scope for scope in key["scopes"] if scope not in SCOPES_ADDED]}
            for key in answer["keys"]
        ]
    if path == "/admin/jobs":
        return [stable("/admin/jobs/", job) for job in answer["jobs"]]
    if path.startswith("/admin/jobs/") and answer.get("state") in ("ready", "held"):
        return answer | {"state": "waiting"}  # a worker has claimed it, or has not yet
    return answer


def test_every_view_of_an_old_state_directory_is_what_it_was(unchanged: OldServer) -> None:
    """History, memberships, receipts, a redaction, an erasure, bans, mutes, keys,
    revocations, rules, jobs, dead letters, endpoints, deliveries, the audit log.
    """
    assert len(EXPECTED["reads"]) == 31
    for read in EXPECTED["reads"]:
        path = read["path"]
        assert stable(path, unchanged.get(read["who"], path)) == stable(path, read["answer"]), path


def test_old_state_directory_gets_the_default_rules_added_since(unchanged: OldServer) -> None:
    rules = {rule["resource"]: rule for rule in unchanged.get("admin", "/admin/rules")["rules"]}
    ours = {rule.resource: rule for rule in DEFAULT_RULES if rule.resource in RULES_ADDED}
    assert ours.keys() == RULES_ADDED
    for resource, rule in ours.items():
        created = rules[resource]
        assert (created["limit"], created["burstSize"]) == (rule.limit, rule.burst_size)


def test_idempotency_key_used_before_gets_the_same_answer(unchanged: OldServer) -> None:
    """Sends and commands, whose key is in the chat's own commit, changes of rules, and
    requests whose answer was stored after them.
    """
    assert len(EXPECTED["keyed"]) == 19
    for used in EXPECTED["keyed"]:
        again = unchanged.ask(used["who"], "POST", used["path"], used["body"], used["key"])
        assert again.is_success, f"{used['path']}: {again.text}"
        is_send = "deduplicated" in used["answer"]
        assert again.json() == used["answer"] | ({"deduplicated": True} if is_send else {})
    assert unchanged.get("alice", LOBBY) == then("alice", LOBBY)


@pytest.mark.parametrize("stored", FINGERPRINTS, ids=lambda stored: stored["path"])
def test_request_has_the_fingerprint_stored_with_its_key(stored: dict[str, Any]) -> None:
    """It is made of the endpoint's name and the body with its defaults; if one changes,
    the repetition of an old request is refused as another one.
    """
    [endpoint] = [
        each
        for each in ENDPOINTS
        if (each.method, each.path) == (stored["method"], stored["path"]) and each.body
    ]
    path = dict.fromkeys(re.findall(r"{(\w+)}", endpoint.path), "p1")
    body = msgspec.json.decode(json.dumps(stored["body"]), type=endpoint.body)
    assert _fingerprint(endpoint, path, body) == stored["fingerprint"]


def test_whoever_was_cut_off_still_is(unchanged: OldServer) -> None:
    def refused(user: str, method: str, path: str, body: Any, key: str = "") -> tuple[int, Any]:
        """The status, and whether a mute is why."""
        answer = unchanged.ask(user, method, path, body, key)
        return answer.status_code, answer.json()["error"]["details"].get("muted")

    def refused_token(token: str) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {token}"}
        answer = httpx.get(f"{unchanged.url}/v1/chats", headers=headers)
        return answer.status_code, answer.json()["error"]["details"]["revoked"]

    text, carol = {"content": "let me in"}, {"user_id": "carol"}
    send = f"/v1/chats/{GROUP}/messages"
    assert refused("dave", "POST", send, text, "dave-1") == (403, True)
    assert refused("carol", "POST", send, text, "carol-2") == (403, None)
    assert refused("alice", "POST", f"/v1/chats/{GROUP}/members", carol) == (403, None)
    assert refused("trudy", "POST", "/v1/chats", {"name": "mine"}) == (403, True)
    assert refused_token(unchanged.mint("mallory")) == (401, "ban")
    assert refused_token(EXPECTED["revoked_token"]) == (401, "token")


def test_rule_changed_before_limits_as_it_did(unchanged: OldServer) -> None:
    """Its second version: two in a day, not three."""
    check = {"resource": "uploads", "subject": "bob"}
    decisions = [
        unchanged.ask("tenant", "POST", "/v1/limits/check", check).json() for _ in range(3)
    ]
    assert [decision["allowed"] for decision in decisions] == [True, True, False]
    assert {decision["rule_version"] for decision in decisions} == {2}


async def test_job_and_dead_letters_of_an_old_store_are_delivered(server: OldServer) -> None:
    """Each once, signed with the old secret; the dead letters in their order."""
    hook = EXPECTED["hook"]
    requests = list[tuple[Mapping[str, str], bytes]]()
    complete = asyncio.Event()

    async def take(request: web.Request) -> web.Response:
        requests.append((request.headers, await request.read()))
        if len(requests) == 6:
            complete.set()
        return web.Response()

    def act(path: str, body: dict[str, Any]) -> None:
        answer = server.ask("admin", "POST", path, body | WHY)
        assert answer.status_code == 200, answer.text

    await asyncio.to_thread(server.serve, *SETTINGS)
    async with asyncio.timeout(PATIENCE_SECONDS), receiving(hook["url"], take):
        await asyncio.to_thread(act, f"/admin/webhooks/{hook['endpoint_id']}/enable", {})
        await asyncio.to_thread(act, "/admin/jobs/replay", {"type": "webhook"})
        await complete.wait()
    received = list[tuple[str, int]]()
    for headers, body in requests:
        verify(hook["secret"], headers, time.time(), body)
        data = json.loads(body)["data"]
        received.append((data["chat_id"], data["sequence"]))
    buried = [(GROUP, sequence) for sequence in (7, 8, 9, 10)]
    assert sorted(received) == sorted([*buried, (GROUP, 11), (DIRECT, 2)])
    assert [each for each in received if each in buried] == buried


@asynccontextmanager
async def receiving(url: str, take: Handler) -> AsyncIterator[None]:
    """An HTTP server at the endpoint's address, as soon as no other test run has it."""
    address = urlsplit(url)
    receiver = web.Application()
    receiver.router.add_post(address.path, take)
    runner = web.AppRunner(receiver)
    await runner.setup()
    try:
        while True:
            try:
                await web.TCPSite(runner, address.hostname, address.port).start()
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                await asyncio.sleep(0.1)
        yield
    finally:
        await runner.cleanup()


async def test_old_client_state_resumes_and_sends_its_message_once(
    server: OldServer, tmp_path: Path
) -> None:
    """It stands at its cursor, and nothing before that comes again."""
    state = tmp_path / "client.db"
    shutil.copyfile(WRITTEN / "client.db", state)
    await asyncio.to_thread(server.serve, *SETTINGS)
    token = await asyncio.to_thread(server.mint, "bob")
    received = list[Message]()
    async with asyncio.timeout(PATIENCE_SECONDS), Client(server.url, token, state=state) as client:
        assert client.device_id == "bobs-phone"
        async for message in client.messages(GROUP):
            received.append(message)
            if message.content == UNSENT:
                break
    async with asyncio.timeout(PATIENCE_SECONDS), Client(server.url, token, state=state) as client:
        assert client.unsent() == []
        last = await client.send(GROUP, "nothing in between")
    missed = [each for each in then("bob", LOBBY)["messages"] if each["sequence"] > CURSOR]
    assert [each.sequence for each in received] == [*(each["sequence"] for each in missed), 12]
    assert received[-1].client_message_id == "unsent-1"
    assert last.sequence == 13
    stored = (await asyncio.to_thread(server.get, "bob", LOBBY))["messages"]
    assert [each["content"] for each in stored].count(UNSENT) == 1


def test_old_backup_is_restored_and_served(server: OldServer, tmp_path: Path) -> None:
    """Of the message after the backup nothing is left; clients see a new epoch."""
    unpack("backup.tar.gz", tmp_path)
    server.ok("restore", str(tmp_path / "backup"), "--overwrite")
    server.serve(*SETTINGS)
    before, now = then("bob", LOBBY), server.get("bob", LOBBY)
    assert before["messages"][-1]["content"] == "after the backup"
    assert now["messages"] == before["messages"][:-1]
    assert now["epoch"] > before["epoch"]
    members, endpoints = f"/v1/chats/{GROUP}", "/admin/webhooks"
    assert server.get("bob", members)["members"] == then("bob", members)["members"]
    for path in ("/admin/revocations", "/admin/rules", "/admin/keys", "/admin/jobs/dead"):
        assert stable(path, server.get("admin", path)) == stable(path, then("admin", path))
    [restored], [saved] = (
        answer["endpoints"] for answer in (server.get("admin", endpoints), then("admin", endpoints))
    )
    assert restored == saved | {"waiting": 1}


@pytest.mark.parametrize("name", VERDICTS)
def test_old_history_gets_the_same_verdicts(name: str, tmp_path: Path) -> None:
    """One that keeps every promise, and for each promise one that breaks it."""
    unpack("histories.tar.gz", tmp_path)
    history = tmp_path / "histories" / name
    done = Program(tmp_path / "state").run("--json", "verify", "--replay", str(history))
    report, then = json.loads(done.stdout), VERDICTS[name]
    known = {each["number"] for each in then["promises"]}
    newer = [each for each in report["promises"] if each["number"] not in known]
    assert all(each["kept"] and each["facts"] == 0 for each in newer)
    report["promises"] = [each for each in report["promises"] if each["number"] in known]
    assert outcome(report, done.returncode) == outcome(then, then["exit_code"])


def outcome(report: dict[str, Any], exit_code: int) -> tuple[Any, ...]:
    """All but the wording of the violations."""
    promises = [
        (each["number"], each["promise"], each["kept"], each["facts"], len(each["violations"]))
        for each in report["promises"]
    ]
    return exit_code, report["kept"], report["operations"], promises
