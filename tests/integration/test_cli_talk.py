"""Two people talk in two terminals while the server is killed under them."""

from __future__ import annotations

import json
import os
import pty
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from program import PATIENCE_SECONDS, Program, Terminal, eventually

KILLS = 2


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path / "state")
    yield program
    program.stop()


def contents(lines: list[str]) -> list[str]:
    return [json.loads(line)["content"] for line in lines]


def test_killing_the_server_in_mid_conversation_loses_and_repeats_nothing(program: Program) -> None:
    server = program.serve()
    chat_id = program.ok("chat", "create", "-u", "alice", "-n", "lobby", "-m", "bob").strip()
    talkers = {name: Terminal(program, chat_id, "--user", name, "--json") for name in ("alice", "bob")}
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
    page = json.loads(program.ok("chat", "history", chat_id, "-u", "alice", "--limit", "500", "--json"))
    stored = [message["content"] for message in page["messages"]]
    for name, talker in talkers.items():
        assert contents(talker.lines) == stored
        assert [line for line in stored if line.startswith(name)] == written[name]


def test_what_was_typed_while_the_server_was_down_leaves_after_the_next_start(program: Program) -> None:
    server = program.serve()
    chat_id = program.ok("chat", "create", "-u", "alice", "-n", "lobby").strip()
    alice = Terminal(program, chat_id, "--user", "alice", "--json")
    eventually(lambda: "-- online" in alice.states, "a connection")
    server.kill()
    server.wait()
    eventually(lambda: any(state.startswith("-- offline") for state in alice.states), "the loss to be told")
    alice.type("into the dark")
    states = program.state_dir / "cli"
    eventually(lambda: any(b"into the dark" in file.read_bytes() for file in states.iterdir()), "the outbox on disk")
    alice.process.kill()
    alice.process.wait()
    program.serve()
    assert program.ok("chat", "open", chat_id, "-u", "alice", "--json").count("into the dark") == 1
    history = program.ok("chat", "history", chat_id, "-u", "alice")
    assert history.count("into the dark") == 1


def test_a_terminal_shows_history_a_prompt_and_what_comes(program: Program) -> None:
    program.serve()
    chat_id = program.ok("chat", "create", "-u", "alice", "-n", "lobby", "-m", "bob").strip()
    program.ok("chat", "send", chat_id, "said before", "-u", "bob")
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(program.environment)
        os.execv(sys.executable, [sys.executable, "-m", "holdfast.cli", "chat", "open", chat_id, "-u", "alice"])
    try:
        seen = read_until(terminal, b"alice> ")
        assert b"bob: said before" in seen
        program.ok("chat", "send", chat_id, "said now", "-u", "bob")
        read_until(terminal, b"bob: said now")
        os.write(terminal, "grüße\x7fe, world\r".encode())
        assert "alice: grüße, world ✓".encode() in read_until(terminal, "world ✓".encode())
        os.write(terminal, b"\x04")
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    finally:
        os.close(terminal)


def read_until(terminal: int, wanted: bytes) -> bytes:
    seen = b""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while wanted not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"in vain waited for {wanted!r}; saw {seen!r}"
        seen += os.read(terminal, 4096)
    return seen
