"""Use a server in every way that leaves something in a file, and save the files.

    python make.py FOLDER

It uses the ``holdfast`` that this Python imports. What the server answers at the end
goes into ``expected.json``: a later version must answer the same.
"""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from holdfast.client import Client, Message

PORT, HOOK_PORT = 18_470, 18_473
URL = f"http://127.0.0.1:{PORT}"
HOOK = f"http://127.0.0.1:{HOOK_PORT}/hook"
TENANT = "acme"
SETTINGS = {
    "access.tokens.ttl_seconds_max": "3000000000",
    "durability.keys.answers_ttl_days": "36500",
    "limits.retention.keys_kept_days": "36500",
    "work.webhooks.parked_seconds_max": "3000000000",
    "work.webhooks.private_allowed": "true",
}
WHY = {"reason": "to be read by a later version"}
EVERYTHING = ["chats:read", "chats:write", "limits:check", "tokens:write"]


class Receiver(http.server.BaseHTTPRequestHandler):
    """Takes every webhook."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def holdfast(state: Path, *words: str) -> Any:
    environment = os.environ | {"HOLDFAST_STATE_DIR": str(state), "HOLDFAST_URL": URL}
    command = [sys.executable, "-m", "holdfast.cli", *words, "--json"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def serve(state: Path) -> subprocess.Popen[bytes]:
    options = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "holdfast.cli", "serve", "--state-dir", str(state)]
    log = state.with_suffix(".log").open("wb")
    server = subprocess.Popen([*command, "--port", str(PORT), *options], stdout=log, stderr=log)
    until(_is_ready)
    return server


def _is_ready() -> bool:
    try:
        return httpx.get(f"{URL}/health/ready").status_code == 200
    except httpx.HTTPError:
        return False


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Story:
    """The requests, and what is saved of their answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.admin = json.loads((self.state / "secrets.json").read_text())["admin_key"]
        self.keyed: list[dict[str, Any]] = []
        self.reads: list[dict[str, Any]] = []
        self.tenant_key = ""
        self.bobs_token = ""

    def call(self, who: str, method: str, path: str, body: Any = None, key: str = "") -> Any:
        """``who``: ``admin``, ``tenant`` (a backend), or a user for whom it acts."""
        credential = self.admin if who == "admin" else self.tenant_key
        headers = {"Authorization": f"Bearer {credential}"}
        if who not in ("admin", "tenant"):
            headers["X-Act-As"] = who
        if key:
            headers["Idempotency-Key"] = key
        answer = httpx.request(method, URL + path, json=body, headers=headers)
        assert answer.status_code < 300, answer.text
        if key and method == "POST":
            self.keyed.append(
                {"who": who, "path": path, "body": body, "key": key, "answer": answer.json()}
            )
        return answer.json()

    def read(self, who: str, path: str) -> None:
        self.reads.append({"who": who, "path": path, "answer": self.call(who, "GET", path)})

    def say(self, who: str, chat: str, content: str, key: str) -> int:
        body = {"content": content}
        sent = self.call(who, "POST", f"/v1/chats/{chat}/messages", body, key)
        return int(sent["sequence"])

    def minted(self, user: str, scopes: list[str], seconds: int = 3_600) -> str:
        body = {"user_id": user, "ttl_seconds": seconds, "scopes": scopes}
        return str(self.call("tenant", "POST", "/v1/tokens", body)["token"])


async def follow(story: Story, chat: str, through: int) -> None:
    """bob's phone: takes the messages, reads them, and keeps its cursor."""
    story.bobs_token = story.minted("bob", ["chats:read", "chats:send"])
    state = story.folder / "client.db"
    async with Client(URL, story.bobs_token, device_id="bobs-phone", state=state) as client:
        async for event in client.events():
            if isinstance(event, Message) and event.chat_id == chat:
                client.read(chat, event.sequence)
                if event.sequence >= through:
                    break

        def is_read() -> bool:
            path = f"/v1/chats/{chat}/messages/{through}/status"
            status = story.call("alice", "GET", path)
            return bool(status["delivered"] == status["read"] == ["bob"])

        await asyncio.to_thread(until, is_read)


async def write_without_server(story: Story, chat: str) -> None:
    token = story.bobs_token
    state = story.folder / "client.db"
    async with Client(URL, token, state=state) as client:
        await client.post(chat, "written without a server", client_message_id="unsent-1")
        assert [entry.client_message_id for entry in client.unsent()] == ["unsent-1"]


def use_server(story: Story) -> dict[str, Any]:
    call, say = story.call, story.say
    new = {"kind": "tenant", "label": "backend", "tenant": TENANT, "scopes": EVERYTHING} | WHY
    story.tenant_key = call("admin", "POST", "/admin/keys", new)["secret"]
    endpoint = call(
        "admin",
        "POST",
        "/admin/webhooks",
        {"url": HOOK, "tenant": TENANT, "description": "hook"} | WHY,
    )
    hook, hook_secret = endpoint["endpoint_id"], endpoint["secret"]
    members = ["bob", "carol", "dave", "erin"]
    group = call("alice", "POST", "/v1/chats", {"name": "lobby", "members": members}, "new-lobby")
    chat = group["chat"]["chat_id"]
    direct = call(
        "alice", "POST", "/v1/chats", {"kind": "direct", "members": ["bob"]}, "new-direct"
    )
    pair = direct["chat"]["chat_id"]
    say("alice", chat, "good morning", "alice-1")
    say("bob", chat, "good morning, alice", "bob-1")
    secret = say("alice", chat, "a password, by mistake", "alice-2")
    say("erin", chat, "the words of somebody who wants to be forgotten", "erin-1")
    say("carol", chat, "buy now", "carol-1")
    say("alice", pair, "only for you: \u00e4\u00f6\u00fc \U0001f600", "alice-3")
    through = say("alice", chat, "see you", "alice-4")
    until(lambda: not call("admin", "GET", "/admin/jobs")["jobs"])
    deliveries = call("admin", "GET", f"/admin/webhooks/{hook}/deliveries")["deliveries"]
    assert deliveries and {each["status"] for each in deliveries} == {204}
    asyncio.run(follow(story, chat, through))

    call("admin", "POST", f"/admin/webhooks/{hook}/disable", WHY, "disable-hook")
    call("alice", "DELETE", f"/v1/chats/{chat}/messages/{secret}")
    call("alice", "POST", f"/v1/chats/{chat}/bans", {"user_id": "carol"}, "ban-carol")
    call("alice", "POST", f"/v1/chats/{chat}/mutes", {"user_id": "dave"}, "mute-dave")
    for kind, user in (("ban", "mallory"), ("mute", "trudy")):
        revocation = {"kind": kind, "tenant": TENANT, "user_id": user} | WHY
        call("admin", "POST", "/admin/revocations", revocation, f"{kind}-{user}")
    stolen = story.minted("alice", ["chats:read"], 2_000_000_000)
    call("admin", "POST", "/admin/revocations", {"kind": "token", "token": stolen} | WHY)
    call("admin", "POST", "/admin/erase", {"tenant": TENANT, "user_id": "erin"} | WHY)
    rule = {"tenantID": TENANT, "resource": "uploads"}
    made = rule | {"algorithm": "token_bucket", "limit": 3, "window": "24h"} | WHY
    call("admin", "POST", "/admin/rules", made, "new-rule")
    call("admin", "PUT", "/admin/rules", rule | {"limit": 2, "expectedVersion": 1} | WHY)
    send = call("admin", "GET", "/admin/rules?tenantID=*&resource=send:user")
    changed = {"tenantID": "*", "resource": "send:user", "expectedVersion": send["version"]}
    call("admin", "PUT", "/admin/rules", changed | {"limit": send["limit"] + 1} | WHY)
    say("alice", chat, "never delivered", "alice-5")
    say("alice", pair, "delivered by a later version", "alice-6")

    def waiting() -> list[dict[str, Any]]:
        return list(call("admin", "GET", "/admin/jobs")["jobs"])

    def is_held() -> bool:
        jobs = {job["stream"].split("/")[1]: job["state"] for job in waiting()}
        return jobs == {chat: "held", pair: "held"}

    until(is_held)
    buried = [job["seq"] for job in waiting() if job["stream"].endswith(chat)]
    call("admin", "POST", "/admin/jobs/bury", {"seqs": buried} | WHY, "bury")
    backup = Path(holdfast(story.state, "backup")["path"])
    pack(backup, story.folder / "backup.tar.gz", "backup")
    shutil.rmtree(backup.parent)
    say("alice", chat, "after the backup", "alice-7")
    until(is_held)

    for who in ("alice", "bob"):
        story.read(who, "/v1/chats")
        for each in (chat, pair):
            story.read(who, f"/v1/chats/{each}")
            story.read(who, f"/v1/chats/{each}/messages?after=0&limit=100")
    story.read("alice", f"/v1/chats/{chat}/bans")
    story.read("alice", f"/v1/chats/{chat}/messages/{through}/status")
    jobs = [job["seq"] for job in waiting()]
    paths = [
        f"/admin/chats/{chat}",
        f"/admin/chats/{chat}/bans",
        "/admin/keys",
        "/admin/revocations",
        "/admin/audit",
        "/admin/rules",
        f"/admin/rules/history?tenantID={TENANT}&resource=uploads",
        "/admin/rules/changes",
        "/admin/jobs",
        "/admin/jobs/acts",
        "/admin/jobs/dead",
        *(f"/admin/jobs/{seq}" for seq in buried + jobs),
        "/admin/webhooks",
        f"/admin/webhooks/{hook}/deliveries",
    ]
    for path in paths:
        story.read("admin", path)
    return {
        "tenant_key": story.tenant_key,
        "revoked_token": stolen,
        "group": chat,
        "direct": pair,
        "hook": {"url": HOOK, "endpoint_id": hook, "secret": hook_secret},
        "settings": SETTINGS,
        "read_through": through,
        "keyed": story.keyed,
        "reads": story.reads,
    }


def pack(source: Path, target: Path, name: str) -> None:
    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return None if member.name.endswith("-shm") else member

    with tarfile.open(target, "w:gz") as archive:
        archive.add(source, name, filter=anonymous)


def make() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir()
    receiver = http.server.ThreadingHTTPServer(("127.0.0.1", HOOK_PORT), Receiver)
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    server = serve(folder / "state")
    try:
        story = Story(folder)
        expected = use_server(story)
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()
    asyncio.run(write_without_server(story, expected["group"]))
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
    pack(folder / "state", folder / "state.tar.gz", "state")


make()
