"""The guides are true: every block of commands in them is run, as it stands, against a
real server.

Blocks marked ``sh`` are run, in order, in one shell per page; ``text`` blocks are what
people see.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import apsw
import pytest
from guides import GUIDES, blocks
from program import PATIENCE_SECONDS, ROOT, Program

DEFAULT_URL = "http://127.0.0.1:8080"
RUNBOOKS = sorted(page.name for page in (GUIDES / "runbooks").glob("*.md"))
OWN_TEST = ("README.md", "fanout-dead-letters.md")
"""Pages that the first test leaves to others."""
PAGES = [
    *("access.md", "getting-started.md", "rest-quickstart.md", "operating.md", "limits.md"),
    *(f"runbooks/{name}" for name in RUNBOOKS if name not in OWN_TEST),
]
PROMISED = {
    "limits.md": ['"decided_by":"counters"'],
    "rest-quickstart.md": ['"deduplicated":true'],
    "runbooks/counter-corruption.md": ["goes on in epoch 2"],
}
"""What the pages say will come out."""

pytestmark = pytest.mark.skipif(
    not (shutil.which("curl") and shutil.which("bash")), reason="the guides use curl and a shell"
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    program = Program(tmp_path_factory.mktemp("guides") / "state")
    program.serve()
    yield program
    program.stop()


@pytest.fixture(scope="module")
def chat(program: Program) -> str:
    return program.ok(
        "chat", "create", "--user", "carol", "--name", "a chat to look at", "--member", "dave"
    ).strip()


def shell(program: Program, script: str, chat: str) -> subprocess.CompletedProcess[str]:
    """Run a script as the guide's reader would, but for the port."""
    tools = program.state_dir.parent / "bin"
    tools.mkdir(exist_ok=True)
    holdfast = tools / "holdfast"
    holdfast.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m holdfast.cli "$@"\n')
    holdfast.chmod(0o755)
    environment = {
        **program.environment,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "CHAT": chat,
    }
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script.replace(DEFAULT_URL, program.url)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE_SECONDS,
    )


@pytest.mark.covers("000 B.1 slow consumer spike")
@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_guide_work_as_written(page: str, program: Program, chat: str) -> None:
    commands = blocks(page)
    assert commands, f"{page} shows no commands"
    done = shell(program, "\n".join(commands), chat)
    assert done.returncode == 0, f"{page}\n{done.stdout}\n{done.stderr}"
    for text in PROMISED.get(page, ()):
        assert done.stdout.count(text) == 1, f"{page} promises {text}"


def test_the_program_of_the_readme_runs_as_printed(program: Program, tmp_path: Path) -> None:
    chat = program.ok("chat", "create", "--user", "frank", "--name", "of the readme").strip()
    example, *_ = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S
    )
    token = program.ok("token", "--user", "frank").strip()
    command = [
        sys.executable,
        "-u",
        "-c",
        example.replace("http://127.0.0.1:8080", program.url),
        token,
        chat,
    ]
    running = subprocess.Popen(
        command, env=program.environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE
    )
    try:
        assert running.stdout is not None
        while "hello" not in (line := running.stdout.readline()):
            assert line, "the program ended"
    finally:
        running.kill()
        running.wait()


def test_program_of_the_python_guide_works_as_written(program: Program) -> None:
    chat = program.ok("chat", "create", "--user", "erin", "--name", "of a program").strip()
    example, *_ = re.findall(
        r"^```python\n(.*?)^```$", (GUIDES / "python-client.md").read_text(), re.M | re.S
    )
    token = program.ok("token", "--user", "erin").strip()
    given = f"token = {token!r}\nchat_id = {chat!r}\n" + example.replace(
        "http://127.0.0.1:8080", program.url
    )
    directory = program.state_dir.parent
    running = subprocess.Popen(
        [sys.executable, "-u", "-c", given],
        env=program.environment,
        cwd=directory,
        text=True,
        stdout=subprocess.PIPE,
    )
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == "1 erin hello\n"
    finally:
        running.kill()
        running.wait()


@pytest.mark.parametrize("page", ["README.md", "docs/guides/getting-started.md"])
def test_server_prints_at_startup_what_the_pages_show(page: str, tmp_path: Path) -> None:
    program = Program(tmp_path / "holdfast")
    program.serve()
    program.stop()
    shown = re.search(r"\$ make run\n(.*?)```", (ROOT / page).read_text(), re.S)
    assert shown is not None
    said = (
        (tmp_path / "serve.log")
        .read_text()
        .replace(str(program.state_dir), "/home/you/.local/state/holdfast")
    )
    said = said.replace(f":{program.port}", ":8080")
    lines = [
        line for line in shown.group(1).splitlines() if not re.match(r"  settings|  try|   ", line)
    ]
    assert len(lines) == 6
    for line in lines:  # the others name the port and the directory of this test
        assert line in said.splitlines(), said


@pytest.mark.covers("000 B.4 counter corruption")
@pytest.mark.covers("001 verification: sends work from max + 1")
def test_the_runbook_of_counter_corruption_repairs_a_corrupted_counter(tmp_path: Path) -> None:
    program = Program(tmp_path / "state")
    server = program.serve()
    chat = program.ok(
        "chat", "create", "--user", "alice", "--name", "lobby", "--member", "bob"
    ).strip()
    program.ok("chat", "send", chat, "one", "--user", "alice")
    server.terminate()
    server.wait(PATIENCE_SECONDS)
    lose_the_counter(program.state_dir / "chats.db")
    program.serve()
    try:
        refused = program.run("chat", "send", chat, "two", "--user", "alice", "--key", "k2")
        assert refused.returncode == 1 and "holdfast chat recover" in refused.stderr
        assert corruptions(program) == 1
        done = shell(program, "\n".join(blocks("runbooks/counter-corruption.md")), chat)
        assert done.returncode == 0, done.stderr
        assert re.search(r"^counter +MISSING", done.stdout, re.MULTILINE), (
            "as the page shows it before the repair"
        )
        program.ok("chat", "send", chat, "two", "--user", "alice", "--key", "k2")
        history = program.ok("chat", "history", chat, "--user", "bob")
        assert [line.split()[0] for line in history.splitlines()] == ["1", "2"]
    finally:
        program.stop()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the page is about Linux")
def test_runbook_of_a_removed_file_saves_every_acknowledged_message(
    tmp_path: Path,
) -> None:
    program = Program(tmp_path / "state")
    program.serve()
    chat = program.ok(
        "chat", "create", "--user", "alice", "--name", "lobby", "--member", "bob"
    ).strip()
    program.ok("chat", "send", chat, "one", "--user", "alice")
    for file in program.state_dir.glob("chats.db*"):
        file.unlink()
    refused = program.run("chat", "send", chat, "two", "--user", "alice", "--key", "k2")
    assert refused.returncode == 1 and "its operator must put them back" in refused.stderr
    rescue = next(block for block in blocks("runbooks/file-gone.md") if "/proc" in block)
    done = shell(program, rescue, chat)
    assert done.returncode == 0, done.stderr
    program.stop()
    program.serve()
    try:
        program.ok("chat", "send", chat, "two", "--user", "alice", "--key", "k2")
        history = program.ok("chat", "history", chat, "--user", "bob")
        assert [line.split()[0] for line in history.splitlines()] == ["1", "2"]
    finally:
        program.stop()


def test_runbook_of_dead_letters_replays_what_fanout_put_aside(tmp_path: Path) -> None:
    program = Program(tmp_path / "state")
    program.serve()
    chat = program.ok("chat", "create", "--user", "alice", "--name", "lobby").strip()
    program.stop()
    connection = apsw.Connection(str(program.state_dir / "chats.db"))
    connection.execute(
        "INSERT INTO dead_letters (shard, log_offset, reason, message, data, at, tenant, chat_id)"
        " VALUES (0, 7, 'undecodable', 'no JSON', x'ff7b7d', '2026-01-01T00:00:00Z', 'default', ?),"
        " (0, 9, 'defect', 'KeyError()', x'7b7d', '2026-01-01T00:00:01Z', '', '')",
        (chat,),
    )
    connection.close()
    program.serve()
    try:
        assert "say which" in program.run("dead", "replay").stderr
        assert program.ok("dead", "show", "1").count("no JSON") == 1
        gone = program.run("dead", "discard", "1", "4711", "--yes", "--reason", "test")
        assert gone.returncode == 1 and "1 forgotten; no such dead letter: 4711" in gone.stdout
        done = shell(program, "\n".join(blocks("runbooks/fanout-dead-letters.md")), chat)
        assert done.returncode == 0, done.stderr
        assert "KeyError()" in done.stdout and "1 replayed" in done.stdout
        assert "No dead letters." in done.stdout and "dead_letters.replay" in done.stdout
        assert program.ok("dead", "ls", "--of", "jobs") == "No dead letters.\n"
    finally:
        program.stop()


def lose_the_counter(file: Path) -> None:
    """What no statement of ours can do: a trigger forbids it."""
    connection = apsw.Connection(str(file))
    connection.execute("DROP TRIGGER counters_are_never_deleted")
    connection.execute("DELETE FROM counters")
    connection.close()


def corruptions(program: Program) -> float:
    key = program.ok("key", "create", "admin", "--label", "test", "--scope", "status:read").split()[
        0
    ]
    request = Request(f"{program.url}/metrics", headers={"Authorization": f"Bearer {key}"})
    with urlopen(request) as answer:
        text = answer.read().decode()
    (line,) = re.findall(
        r"^holdfast_durability_counter_corruption_total (\S+)$", text, re.MULTILINE
    )
    return float(line)
