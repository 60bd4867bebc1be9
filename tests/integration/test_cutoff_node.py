"""Cutting a user off a real server: commands in, sockets closed, files that keep it."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets
from program import Program, Ran

from holdfast.client import Client
from holdfast.errors import Forbidden, Unauthorized

Socket = websockets.ClientConnection


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    program = Program(tmp_path_factory.mktemp("cutoff") / "state")
    program.serve()
    yield program
    program.stop()


def failed(done: Ran) -> str:
    assert done.returncode == 1, done
    return done.stderr


async def connect(program: Program, token: str, device: str = "") -> Socket:
    headers = {"Authorization": f"Bearer {token}", **({"X-Device-ID": device} if device else {})}
    url = program.url.replace("http", "ws") + "/v1/ws"
    client = await websockets.connect(url, additional_headers=headers, compression=None)
    assert json.loads(await client.recv())["type"] == "connection_established"
    return client


async def closing(client: Socket) -> tuple[int, dict[str, Any]]:
    """How the server closed it: the code, and its last frame."""
    last: dict[str, Any] = {}
    async with asyncio.timeout(10):
        try:
            while True:
                last = json.loads(await client.recv())
        except websockets.ConnectionClosed as closed:
            assert closed.rcvd is not None
            return closed.rcvd.code, last["payload"]


async def run(program: Program, *arguments: str, stdin: str = "") -> Ran:
    return await asyncio.to_thread(lambda: program.run(*arguments, stdin=stdin))


async def test_socket_of_a_revoked_token_closes_within_a_second_and_cannot_come_back(
    program: Program,
) -> None:
    made = json.loads(program.ok("token", "--user", "alice", "--json"))
    token, other = made["token"], program.ok("token", "--user", "alice").strip()

    phone, tablet = await connect(program, token, "phone"), await connect(program, other, "tablet")
    began = time.monotonic()
    done = await run(program, "revoke", "token", "--file", "-", stdin=token + "\n")
    assert f"token {made['jti']} is revoked; undo it with: holdfast revoke undo" in done.stdout
    code, last = await closing(phone)
    # the command and its process are in it, too
    assert code == 4502 and time.monotonic() - began < 5
    assert (last["reason"], last["reconnect_allowed"]) == ("unauthorized", False)
    assert "revoked" in last["message"]
    with pytest.raises(websockets.InvalidStatus, match="401"):
        await connect(program, token, "phone")
    await tablet.ping()
    await tablet.close()
    assert "revoked" in failed(program.run("chat", "list", "--token", token))
    assert program.run("chat", "list", "--token", other).returncode == 0


async def test_user_and_device_are_cut_off_until_that_is_undone(program: Program) -> None:
    token = program.ok("token", "--user", "bob").strip()

    phone, tablet = await connect(program, token, "phone"), await connect(program, token, "tablet")
    await run(program, "revoke", "device", "bob", "phone")
    assert (await closing(phone))[0] == 4502
    with pytest.raises(websockets.InvalidStatus, match="401"):
        await connect(program, token, "phone")
    await run(program, "revoke", "user", "bob", "--reason", "lost laptop")
    assert (await closing(tablet))[0] == 4502
    for entry in json.loads((await run(program, "revoke", "ls", "--user", "bob", "--json")).stdout):
        await run(program, "revoke", "undo", str(entry["number"]))
    await (await connect(program, token, "phone")).close()
    assert program.run("chat", "list", "--token", token).returncode == 0


async def test_tokens_outlive_their_tenant_key_until_the_tenant_is_revoked(
    program: Program,
) -> None:
    made = json.loads(
        program.ok("key", "create", "tenant", "--label", "leaked", "--tenant", "shop", "--json")
    )
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {made['secret']}"}) as http:
        answer = await http.post(f"{program.url}/v1/tokens", json={"user_id": "ceo"})
    token = answer.json()["token"]
    revoked = program.run("key", "revoke", made["key"]["key_id"], "--reason", "leaked")
    assert revoked.returncode == 0
    assert "tokens that were made with it are good until they expire" in revoked.stderr
    command = "holdfast revoke tenant shop"
    assert command in revoked.stderr

    client = await connect(program, token)
    done = await run(program, *command.split()[1:], "--reason", "key leaked")
    assert "tokens of the tenant shop issued before" in done.stdout
    assert "holdfast revoke undo" in done.stdout
    assert (await closing(client))[0] == 4502
    with pytest.raises(websockets.InvalidStatus, match="401"):
        await connect(program, token)
    assert "tenant" in program.ok("revoke", "ls", "--tenant", "shop")
    assert "tokens" not in program.run("key", "revoke", "key_unknown").stderr


async def test_disconnected_user_may_come_back(program: Program) -> None:
    token = program.ok("token", "--user", "dave").strip()

    client = await connect(program, token, "phone")
    assert (
        "nobody matched" in (await run(program, "disconnect", "dave", "--device", "tablet")).stdout
    )
    done = await run(program, "disconnect", "dave", "--json")
    assert json.loads(done.stdout) == {"closed": 1}
    code, last = await closing(client)
    assert (code, last["reconnect_allowed"]) == (4004, True)
    await (await connect(program, token, "phone")).close()


def test_ban_and_mute_in_a_chat_and_in_the_tenant_are_made_and_lifted(program: Program) -> None:
    chat = program.ok("chat", "create", "-u", "owner", "-n", "room", "-m", "mallory").strip()
    assert "is muted in" in program.ok("mute", "mallory", "--chat", chat)
    assert "muted" in failed(program.run("chat", "send", chat, "hi", "-u", "mallory"))
    program.ok("unmute", "mallory", "--chat", chat)
    program.ok("chat", "send", chat, "hi", "-u", "mallory")
    assert "is banned in" in program.ok("ban", "mallory", "--chat", chat, "--reason", "spam")
    assert "banned" in failed(program.run("chat", "invite", chat, "mallory", "-u", "owner"))
    token = program.ok("token", "--user", "owner").strip()
    lifting = urllib.request.Request(
        f"{program.url}/v1/chats/{chat}/bans/mallory",
        headers={"Authorization": f"Bearer {token}"},
        method="DELETE",
    )
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(lifting)
    assert "owner" in failed(program.run("ban", "owner", "--chat", chat))
    program.ok("unban", "mallory", "--chat", chat)
    assert "not banned" in failed(program.run("unban", "mallory", "--chat", chat))
    program.ok("chat", "invite", chat, "mallory", "-u", "owner")
    assert "is muted in the tenant default" in program.ok("mute", "mallory")
    assert "muted" in failed(program.run("chat", "send", chat, "again", "-u", "mallory"))
    program.ok("ban", "mallory", "--reason", "spam")
    refusal = failed(program.run("chat", "list", "-u", "mallory"))
    assert (
        "banned (an operator lifts it with `holdfast unban`)" in refusal
        and "admin key" not in refusal
    )
    listed = json.loads(program.ok("revoke", "ls", "--user", "mallory", "--json"))
    assert [entry["kind"] for entry in listed] == ["mute", "ban"]
    assert "when lifted" in program.ok("revoke", "ls", "--user", "mallory")
    program.ok("unban", "mallory")
    program.ok("unmute", "mallory")
    program.ok("chat", "send", chat, "again", "-u", "mallory")
    assert "nothing was changed" in failed(program.run("unmute", "mallory"))
    assert "no revocation 4711" in failed(program.run("revoke", "undo", "4711"))
    assert program.ok("revoke", "ls", "--user", "mallory").strip() == "Nobody is cut off."


async def test_client_of_a_muted_user_hears_why_and_that_of_a_revoked_one_ends(
    program: Program,
) -> None:
    chat = program.ok("chat", "create", "-u", "host", "-n", "hall", "-m", "guest").strip()
    token = program.ok("token", "--user", "guest").strip()

    async with asyncio.timeout(20):
        async with Client(program.url, token) as client:
            await client.send(chat, "one")
            await run(program, "mute", "guest", "--chat", chat)
            with pytest.raises(Forbidden, match="muted") as muted:
                await client.send(chat, "two")
            assert muted.value.details["muted"]
            await run(program, "unmute", "guest", "--chat", chat)
            await client.send(chat, "three")
            await run(program, "revoke", "user", "guest")
            with pytest.raises(Unauthorized):
                await client.send(chat, "four")
    texts = json.loads(program.ok("chat", "history", chat, "-u", "host", "--json"))["messages"]
    assert [message["content"] for message in texts if message["kind"] == "text"] == [
        "one",
        "three",
    ]


def test_whoever_is_cut_off_stays_so_through_a_kill_a_backup_and_a_restore(tmp_path: Path) -> None:
    program = Program(tmp_path / "state")
    server = program.serve()
    program.ok("ban", "mallory")
    taken = json.loads(program.ok("backup", "--json"))
    assert {"access.db": {"revocations": 1}}.items() <= {
        f["name"]: f["counts"] for f in taken["files"]
    }.items()
    number = json.loads(program.ok("ban", "eve", "--json"))["number"]
    server.kill()
    server.wait()
    try:
        program.serve()
        assert "banned" in failed(program.run("chat", "list", "-u", "mallory"))
        assert "banned" in failed(program.run("chat", "list", "-u", "eve"))
        program.stop()
        program.ok("restore", taken["path"], "--overwrite")
        program.serve()
        assert "banned" in failed(program.run("chat", "list", "-u", "eve")), (
            "a restore undoes no ban"
        )
        program.ok("revoke", "undo", str(number))
    finally:
        program.stop()
    elsewhere = Program(tmp_path / "elsewhere")
    elsewhere.ok("restore", taken["path"])
    elsewhere.serve()
    try:
        assert "banned" in failed(elsewhere.run("chat", "list", "-u", "mallory")), (
            "where there is none it is brought"
        )
        assert elsewhere.run("chat", "list", "-u", "eve").returncode == 0
    finally:
        elsewhere.stop()
