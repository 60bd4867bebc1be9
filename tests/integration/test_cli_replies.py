"""``holdfast ask`` at a terminal of a real server: its place in the queue, Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from program import PATIENCE_SECONDS, Program, eventually

SETTINGS = """
[streaming.pool]
per_user = 1

[[streaming.providers]]
name = "quick"
kind = "scripted"
script = { text = "one two three", tokens_per_second = 0 }

[[streaming.providers]]
name = "endless"
kind = "scripted"
script = { tokens = 20000, tokens_per_second = 20 }

[[streaming.models]]
name = "quick"
providers = ["quick:any"]

[[streaming.models]]
name = "endless"
providers = ["endless:any"]
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    folder = tmp_path_factory.mktemp("ask")
    (folder / "holdfast.toml").write_text(SETTINGS)
    program = Program(folder / "state")
    program.serve("--config", str(folder / "holdfast.toml"))
    yield program
    program.stop()


class TypedCommand:
    """A command at a terminal of its own."""

    def __init__(self, program: Program, *arguments: str) -> None:
        self._terminal, theirs = pty.openpty()
        command = [sys.executable, "-m", "holdfast.cli", *arguments]
        self.process = subprocess.Popen(
            command,
            env={**program.environment, "TERM": "xterm"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.shown = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._terminal, 4096):
                self.shown += data.decode(errors="replace")
        except OSError:
            pass  # the other side has closed it

    def until(self, pattern: str) -> None:
        eventually(lambda: re.search(pattern, self.shown) is not None, pattern)

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.ended()

    def ended(self) -> int:
        code = self.process.wait(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
        os.close(self._terminal)
        return code


def states(program: Program) -> list[str]:
    found = json.loads(program.ok("replies", "ls", "--json"))["replies"]
    return sorted(reply["state"] for reply in found if reply["state"] != "ended")


def test_ask_waits_its_turn_visibly_and_ctrl_c_cancels(program: Program) -> None:
    first = TypedCommand(program, "ask", "--user", "alice", "--model", "endless", "Hi")
    first.until("You")
    second = TypedCommand(program, "ask", "--user", "alice", "--model", "quick", "Hi")
    second.until("waiting: place 1 in the queue")
    assert states(program) == ["running", "waiting"]
    assert first.interrupt() == 130
    assert first.shown.rstrip().endswith("Cancelled.")
    assert second.ended() == 0
    assert "one two three" in second.shown
    eventually(lambda: states(program) == [], "the end of both")


def test_operator_finds_cancels_and_counts_a_reply(program: Program) -> None:
    asked = program.start(
        "ask", "--user", "bob", "--model", "endless", "Hi",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    eventually(lambda: "running" in states(program), "the reply")
    [reply] = [
        each
        for each in json.loads(program.ok("replies", "ls", "--owner", "bob", "--json"))["replies"]
        if each["state"] == "running"
    ]
    assert reply["model"] in program.ok("replies", "show", reply["reply_id"])
    assert program.ok("replies", "cancel", reply["reply_id"], "--reason", "test") == "cancelled\n"
    _, errors = asked.communicate(timeout=PATIENCE_SECONDS)
    assert asked.returncode == 1 and "(cancelled)" in errors
    [row] = json.loads(program.ok("usage", "--user", "bob", "--json"))["rows"]
    assert (row["replies"], row["provider"], row["model"]) == (1, "endless", "endless")


def test_usage_of_a_complete_reply_is_exact(program: Program) -> None:
    done = json.loads(program.ok("ask", "--user", "carol", "--json", "Hi"))
    assert (done["model"], done["text"]) == ("quick", "one two three"), "the first of the models"
    [row] = json.loads(program.ok("usage", "--user", "carol", "--json"))["rows"]
    counted = {"prompt_tokens": row["prompt_tokens"], "completion_tokens": row["completion_tokens"]}
    assert {**counted, "estimated": False} == done["usage"] and row["estimated"] == 0
