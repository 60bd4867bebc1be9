"""Two people talk in two terminals while the server is killed under them."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import apsw
import pytest
from program import PATIENCE_SECONDS, ROOT, Program, Terminal, eventually

from holdfast.access.secrets import read_secrets
from holdfast.access.tokens import Tokens, TokenSettings, shared_secret
from holdfast.cli import terminal_chat
from holdfast.cli.rest import RestClient
from holdfast.cli.screen import PlainScreen
from holdfast.client import Client
from holdfast.client.outbox import OutboxEntry
from holdfast.clock import SystemClock
from holdfast.message import User

KILLS = 2


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path / "state")
    yield program
    program.stop()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    program = Program(tmp_path_factory.mktemp("talk") / "state")
    program.serve()
    yield program
    program.stop()


@pytest.fixture
def serving(served: Program) -> Program:
    """A server that the test leaves as it is; no window was ever opened."""
    shutil.rmtree(served.state_dir / "cli", ignore_errors=True)
    return served


def contents(lines: list[str]) -> list[str]:
    return [json.loads(line)["content"] for line in lines]


def unsent(program: Program) -> list[str]:
    """What all windows would find in their files if they were killed now."""
    found = []
    with TemporaryDirectory() as folder:
        for file in (program.state_dir / "cli").glob("*.db"):
            for part in (file, file.with_name(f"{file.name}-wal")):
                shutil.copyfile(part, Path(folder) / part.name)
            with closing(apsw.Connection(str(Path(folder) / file.name))) as state:
                found += [content for (content,) in state.execute("SELECT content FROM outbox")]
    return found


def test_killed_server_loses_and_repeats_no_message(program: Program) -> None:
    server = program.serve()
    chat_id = program.ok("chat", "create", "-u", "alice", "-n", "lobby", "-m", "bob").strip()
    talkers = {
        name: Terminal(program, chat_id, "--user", name, "--json") for name in ("alice", "bob")
    }
    for talker in talkers.values():
        eventually(lambda talker=talker: "-- online" in talker.states, "a connection")
    written: dict[str, list[str]] = {name: [] for name in talkers}
    for kill in range(KILLS):
        for number in range(4):
            for name, talker in talkers.items():
                line = f"{name} {kill}.{number}"
                talker.type(line)
                written[name].append(line)
            if number == 1:
                server.kill()
                server.wait()
        server = program.serve()
    total = sum(len(lines) for lines in written.values())
    for talker in talkers.values():
        eventually(lambda talker=talker: len(talker.lines) >= total, f"{total} lines")
    assert [talker.leave() for talker in talkers.values()] == [0, 0]
    page = json.loads(
        program.ok("chat", "history", chat_id, "-u", "alice", "--limit", "500", "--json")
    )
    stored = [message["content"] for message in page["messages"]]
    for name, talker in talkers.items():
        assert contents(talker.lines) == stored
        assert [line for line in stored if line.startswith(name)] == written[name]


def test_lines_typed_while_the_server_is_down_are_sent_after_a_restart(
    program: Program,
) -> None:
    server = program.serve()
    chat_id = program.ok("chat", "create", "-u", "alice", "-n", "lobby").strip()
    alice = Terminal(program, chat_id, "--user", "alice", "--json")
    eventually(lambda: "-- online" in alice.states, "a connection")
    server.kill()
    server.wait()
    eventually(
        lambda: any(state.startswith("-- offline") for state in alice.states),
        "the loss to be reported",
    )
    alice.type("into the dark")
    eventually(lambda: "into the dark" in unsent(program), "the outbox on disk")
    alice.process.kill()
    alice.process.wait()
    program.serve()
    assert program.ok("chat", "open", chat_id, "-u", "alice", "--json").count("into the dark") == 1
    history = program.ok("chat", "history", chat_id, "-u", "alice")
    assert history.count("into the dark") == 1


def test_unsent_messages_of_any_window_are_sent_by_the_next_one(program: Program) -> None:
    server = program.serve()
    chat_id = program.ok("chat", "create", "-u", "alice", "-n", "lobby").strip()
    windows = [Terminal(program, chat_id, "--user", "alice", "--json") for _ in range(2)]
    for window in windows:
        eventually(lambda window=window: "-- online" in window.states, "a connection")
    server.kill()
    server.wait()
    said = [f"into the dark {number}" for number in range(2)]
    for line, window in zip(said, windows, strict=True):
        window.type(line)
    eventually(lambda: sorted(unsent(program)) == said, "the outbox on disk")
    for window in windows:
        window.process.kill()
        window.process.wait()
    program.serve()
    program.ok("chat", "open", chat_id, "-u", "alice", "--json")
    history = program.ok("chat", "history", chat_id, "-u", "alice")
    assert [history.count(line) for line in said] == [1, 1]
    assert not program.ok("chat", "open", chat_id, "-u", "alice", "--history", "0", "--json"), (
        "nothing is left"
    )


def test_sixth_window_is_refused(serving: Program) -> None:
    chat_id = serving.ok("chat", "create", "-u", "alice", "-n", "lobby").strip()
    serving.ok("chat", "open", chat_id, "-u", "alice")
    (first,) = (serving.state_dir / "cli").glob("*-1.db")
    windows = [
        apsw.Connection(str(first.with_name(first.name.replace("-1", f"-{n}"))))
        for n in range(1, 6)
    ]
    for window in windows:
        window.execute("BEGIN EXCLUSIVE")
    refused = serving.run("chat", "open", chat_id, "-u", "alice")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "open in 5 terminals" in refused.stderr and "close one" in refused.stderr
    for window in windows:
        window.close()


@pytest.mark.parametrize("window", [1, 2])
def test_damaged_file_of_a_window_is_reported_and_the_chat_opens(
    serving: Program, window: int
) -> None:
    chat_id = serving.ok("chat", "create", "-u", "alice", "-n", "lobby").strip()
    serving.ok("chat", "open", chat_id, "-u", "alice")
    (first,) = (serving.state_dir / "cli").glob("*-1.db")
    damaged = first.with_name(first.name.replace("-1", f"-{window}"))
    damaged.write_bytes(b"no database" * 1000)
    talked = serving.run("chat", "open", chat_id, "-u", "alice")
    assert talked.returncode == 0
    assert f"{damaged} is damaged" in talked.stderr and "move it aside" in talked.stderr


def leave_in_another_window(program: Program, chat_id: str, *contents: str) -> Path:
    """A file such as a window leaves that was killed before these were sent."""
    program.ok("chat", "open", chat_id, "-u", "alice")
    (first,) = (program.state_dir / "cli").glob("*-1.db")
    other = first.with_name(first.name.replace("-1", "-2"))
    other.write_bytes(first.read_bytes())
    with closing(apsw.Connection(str(other))) as state:
        for content in contents:
            state.execute(
                "INSERT INTO outbox (client_message_id, chat_id, content, content_type) VALUES (?,"
                " ?, ?, ?)",
                (f"key-{len(content)}", chat_id, content, "text/plain"),
            )
    return other


def test_refused_message_of_another_window_is_reported_and_kept(
    serving: Program,
) -> None:
    chat_id = serving.ok("chat", "create", "-u", "alice", "-n", "lobby").strip()
    other = leave_in_another_window(serving, chat_id, "x" * 5000, "hello")
    talked = serving.run("chat", "open", chat_id, "-u", "alice")
    assert talked.returncode == 0 and "alice: hello" in talked.stdout
    assert "5000 bytes" in talked.stderr and str(other) in talked.stderr
    with closing(apsw.Connection(str(other))) as state:
        assert state.execute("SELECT client_message_id FROM outbox").get == "key-5000", (
            "kept, and not locked"
        )


def test_message_of_another_window_is_shown_although_sent_before_the_chat_opens(
    serving: Program, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    chat_id = serving.ok("chat", "create", "-u", "alice", "-n", "lobby").strip()
    leave_in_another_window(serving, chat_id, "hello")
    token = serving.ok("token", "-u", "alice").strip()
    room = terminal_chat.Room(
        RestClient(serving.url, token),
        lambda: token,
        False,
        chat_id,
        20,
        serving.state_dir,
        as_json=False,
    )

    async def late(client: Client) -> None:
        while client.unsent():
            await client.connected()
            await asyncio.sleep(0)

    take_over = terminal_chat._take_over

    async def slowly(file: Path, client: Client) -> list[OutboxEntry]:
        taken = await take_over(file, client)
        await asyncio.wait_for(late(client), PATIENCE_SECONDS)
        return taken

    monkeypatch.setattr(terminal_chat, "_take_over", slowly)
    asyncio.run(terminal_chat.run_chat(room))
    assert "alice: hello" in capfd.readouterr().out


def test_user_who_is_removed_gets_the_reason_and_the_chat_ends(serving: Program) -> None:
    chat_id = serving.ok("chat", "create", "-u", "alice", "-n", "lobby", "-m", "bob").strip()
    bob = Terminal(serving, chat_id, "--user", "bob")
    eventually(lambda: "-- online" in bob.states, "a connection")
    alice = RestClient(serving.url, serving.ok("token", "-u", "alice").strip())
    alice.delete("/v1/chats", chat_id, "members", "bob")
    assert bob.ended() == 1
    assert "alice removed bob" in "".join(bob.lines)
    assert bob.states[-1].startswith("Error: you are not a member of this chat any more; ask")


class StillTyping(PlainScreen):
    """The input of somebody who has said one thing and stays."""

    async def lines(self) -> AsyncIterator[str]:
        yield "just in time"
        await asyncio.Event().wait()


def test_token_that_expires_ends_the_chat_with_advice(
    serving: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat_id = serving.ok("chat", "create", "-u", "alice", "-n", "lobby").strip()
    secret = read_secrets(serving.state_dir).jwt_secret.encode()
    monkeypatch.setattr(terminal_chat, "screen_for", lambda name: StillTyping())
    # In this process: starting another one may take longer than the token lasts.
    token = Tokens(TokenSettings(), shared_secret(secret), SystemClock()).mint(
        User("default", "alice"), 5
    )
    talked = serving.run("chat", "open", chat_id, "--token", token)
    assert talked.returncode == 1 and "just in time ✓" in talked.stdout
    last = talked.stderr.splitlines()[-1]
    assert "the token has expired" in last and "holdfast token --user" in last


INPUT_AFTER_THE_END = """
import asyncio, os, sys, threading
from holdfast.cli.screen import PlainScreen

async def talk():
    async for line in PlainScreen().lines():
        return

reading, writing = os.pipe()
os.dup2(reading, 0)
os.write(writing, b"line\\n" * int(sys.argv[1]))
asyncio.run(talk())
os.write(writing, b"more\\n")
os.close(writing)
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join()
"""


@pytest.mark.parametrize("lines", [1, 1000])
def test_input_after_the_end_of_the_chat_is_ignored(lines: int) -> None:
    """The thread that reads it may wait for room, or for more."""
    done = subprocess.run(
        [sys.executable, "-c", INPUT_AFTER_THE_END, str(lines)],
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_shows_that_it_is_offline_and_what_waits(program: Program) -> None:
    server = program.serve()
    chat_id = program.ok("chat", "create", "-u", "alice", "-n", "lobby").strip()
    with pseudo_terminal(program, chat_id) as (_, terminal):
        read_until(terminal, b"alice> ")
        server.kill()
        server.wait()
        read_until(terminal, b"alice (offline: ")
        os.write(terminal, b"into the dark\r")
        read_until(terminal, "… into the dark".encode())
        program.serve()
        seen = read_until(terminal, "alice: into the dark ✓".encode())
        assert seen.count("✓".encode()) == 1


def test_a_terminal_opens_without_a_server_and_catches_up_when_there_is_one(
    program: Program,
) -> None:
    server = program.serve()
    chat_id = program.ok("chat", "create", "-u", "alice", "-n", "lobby", "-m", "bob").strip()
    program.ok("chat", "send", chat_id, "said before", "-u", "bob")
    server.kill()
    server.wait()
    with pseudo_terminal(program, chat_id) as (pid, terminal):
        seen = read_until(terminal, b"alice (offline: ")
        assert b"there is no server at" in seen and b"what you type is kept" in seen
        os.write(terminal, b"into the dark\r")
        read_until(terminal, "… into the dark".encode())
        program.serve()
        seen = read_until(terminal, "alice: into the dark ✓".encode())
        assert seen.count(b"bob: said before") == 1
        program.ok("chat", "send", chat_id, "said after", "-u", "bob")
        seen = read_until(terminal, b"bob: said after")
        os.write(terminal, b"\x04")
        os.waitpid(pid, 0)
        assert "✓".encode() not in seen and b"said before" not in seen, "each line appears once"


def test_pipe_without_a_server_fails_at_once(program: Program) -> None:
    server = program.serve()
    chat_id = program.ok("chat", "create", "-u", "alice", "-n", "lobby").strip()
    server.kill()
    server.wait()
    refused = program.run("chat", "open", chat_id, "-u", "alice")
    assert refused.returncode == 1 and "there is no server at" in refused.stderr


def test_a_terminal_shows_history_a_prompt_and_what_comes(serving: Program) -> None:
    chat_id = serving.ok("chat", "create", "-u", "alice", "-n", "lobby", "-m", "bob").strip()
    serving.ok("chat", "send", chat_id, "said before", "-u", "bob")
    with pseudo_terminal(serving, chat_id) as (pid, terminal):
        seen = read_until(terminal, b"alice> ")
        assert b"bob: said before" in seen
        serving.ok("chat", "send", chat_id, "said now", "-u", "bob")
        read_until(terminal, b"bob: said now")
        os.write(terminal, "grüße\x7fe, world\r".encode())
        assert "alice: grüße, world ✓".encode() in read_until(terminal, "world ✓".encode())
        os.write(terminal, b"\x04")
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0


ASSISTANT = """
[[streaming.providers]]
name = "trial"
kind = "scripted"
script = { text = "one two three four five six", tokens_per_second = 5 }

[[streaming.models]]
name = "tiny"
providers = ["trial:tiny"]

[[streaming.assistants]]
tenant = "default"
user = "bot"
model = "tiny"
"""


def test_a_terminal_shows_a_reply_growing_then_its_message_once(
    program: Program, tmp_path: Path
) -> None:
    config = tmp_path / "holdfast.toml"
    config.write_text(ASSISTANT)
    program.serve("--config", str(config))
    chat_id = program.ok("chat", "create", "-u", "alice", "--direct", "bot").strip()
    with pseudo_terminal(program, chat_id) as (pid, terminal):
        read_until(terminal, b"alice> ")
        os.write(terminal, b"count\r")
        seen = read_until(terminal, b"bot: one two three four five six\r\n")
        os.write(terminal, b"\x04")
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    growing = re.search("bot: one[a-z ]*…\x1b\\[0m\r\nalice> \r\x1b\\[1A".encode(), seen)
    assert growing, "it grows, and its line is written again"
    whole = re.findall(rb"\d\d:\d\d bot: one two three four five six\r\n", seen)
    assert len(whole) == 1


def test_line_that_begins_with_a_slash_is_a_command(
    serving: Program,
) -> None:
    chat_id = serving.ok("chat", "create", "-u", "alice", "-n", "lobby").strip()
    with pseudo_terminal(serving, chat_id) as (pid, terminal):
        assert b"/quit or Ctrl+D leaves" in read_until(terminal, b"alice> ")
        os.write(terminal, b"/help\r")
        read_until(terminal, b"send a line that begins with /")
        os.write(terminal, b"/quti\r")
        read_until(terminal, b"there is no command /quti")
        os.write(terminal, b"//shrug\r")
        read_until(terminal, "alice: /shrug ✓".encode())
        os.write(terminal, b"/quit\r")
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    said = json.loads(serving.ok("chat", "history", chat_id, "-u", "alice", "--json"))
    assert [message["content"] for message in said["messages"] if message["kind"] == "text"] == [
        "/shrug"
    ]


def test_text_pasted_while_the_server_is_down_is_kept_and_the_user_can_leave(
    program: Program,
) -> None:
    server = program.serve()
    chat_id = program.ok("chat", "create", "-u", "alice", "-n", "lobby").strip()
    said = [f"line {number}" for number in range(2000)]
    with pseudo_terminal(program, chat_id) as (pid, terminal):
        read_until(terminal, b"alice> ")
        server.kill()
        server.wait()
        read_until(terminal, b"alice (offline: ")
        pasted = "".join(f"{line}\r" for line in said).encode() + b"\x03"
        pasting = threading.Thread(target=os.write, args=(terminal, pasted), daemon=True)
        pasting.start()
        read_until(terminal, b"2000 not sent yet: kept")
        pasting.join(PATIENCE_SECONDS)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    (file,) = (program.state_dir / "cli").glob("*-1.db")
    with closing(apsw.Connection(str(file))) as state:
        assert [
            content for (content,) in state.execute("SELECT content FROM outbox ORDER BY number")
        ] == said


@contextmanager
def pseudo_terminal(program: Program, chat_id: str) -> Iterator[tuple[int, int]]:
    """``chat open`` of Alice on a pseudo-terminal: the process, and the other end."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(program.environment)
        os.execv(
            sys.executable,
            [sys.executable, "-m", "holdfast.cli", "chat", "open", chat_id, "-u", "alice"],
        )
    try:
        yield pid, terminal
    finally:
        os.close(terminal)  # hangs up, which ends it
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def read_until(terminal: int, wanted: bytes) -> bytes:
    seen = b""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"in vain waited for {wanted!r}; saw {seen!r}"
        seen += os.read(terminal, 4096)
    return seen
