"""``holdfast rules`` against a real server: every command, and what it says when it cannot."""

from __future__ import annotations

import json
import shlex
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from program import Program, eventually

RULE = ("acme", "/api/search")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    program = Program(tmp_path_factory.mktemp("rules") / "state")
    program.serve()
    yield program
    program.stop()


def test_a_rules_life_on_the_command_line(program: Program, tmp_path: Path) -> None:
    made = program.ok("rules", "set", *RULE, "algorithm=token_bucket", "limit=100", "window=60s", "--json")
    assert (json.loads(made)["limit"], json.loads(made)["version"]) == (100, 1)
    assert "limit" in program.ok("rules", "get", *RULE)
    program.ok("rules", "set", *RULE, "limit=500", "--version", "1", "--reason", "the sale")
    assert "100 → 500" in program.ok("rules", "diff", *RULE)
    history = json.loads(program.ok("rules", "history", *RULE, "--json"))
    assert [(c["action"], c["reason"]) for c in history] == [
        ("update", "the sale"), ("create", "asked for on the command line"),
    ]  # fmt: skip
    assert "the sale" in program.ok("rules", "history", *RULE)
    assert json.loads(program.ok("rules", "rollback", *RULE, "1", "--json"))["limit"] == 100
    program.ok("rules", "delete", *RULE)
    assert json.loads(program.ok("rules", "rollback", *RULE, "2", "--json"))["limit"] == 500
    listed = program.ok("rules", "ls")
    assert "/api/search" in listed and "send:user" in listed, "the default rules are there to see"
    file = tmp_path / "rules.json"
    file.write_text(program.ok("rules", "export", "--tenant", "acme"))
    assert "Nothing to change" in program.ok("rules", "import", str(file))
    wanted = [{**json.loads(file.read_text())[0], "limit": 7}, {**json.loads(file.read_text())[0], "resource": "/new"}]
    file.write_text(json.dumps(wanted))
    assert "limit" in program.ok("rules", "import", str(file), "--dry-run")
    assert json.loads(program.ok("rules", "get", *RULE, "--json"))["limit"] == 500
    program.ok("rules", "import", str(file))
    assert json.loads(program.ok("rules", "get", *RULE, "--json"))["limit"] == 7
    assert json.loads(program.ok("rules", "get", "acme", "/new", "--json"))["version"] == 1


def test_a_burst_is_set_and_unset(program: Program) -> None:
    rule = ("acme", "bursting")
    program.ok("rules", "set", *rule, "algorithm=token_bucket", "limit=100", "window=60s", "burstSize=500")
    assert json.loads(program.ok("rules", "get", *rule, "--json"))["burstSize"] == 500
    assert "burstSize" not in json.loads(program.ok("rules", "set", *rule, "burstSize=none", "--json"))
    program.ok("rules", "set", *rule, "burstSize=500")
    assert "burstSize" not in json.loads(program.ok("rules", "set", *rule, "algorithm=fixed_window", "--json"))


def test_mistakes_are_told_in_a_sentence(program: Program) -> None:
    program.ok("rules", "set", "acme", "x", "algorithm=fixed_window", "limit=1", "window=1s")
    for words, said in [
        (("set", "acme", "x", "limit=-1"), "limit must be a whole number"),
        (("set", "acme", "x", "limit=١"), "limit must be a whole number"),
        (("set", "acme", "x", "limit=none"), "limit must be a whole number"),
        (("set", "acme", "x", f"limit={'9' * 5000}"), "limit must be a whole number"),
        (("set", "acme", "x", "colour=red"), "colour"),
        (("set", "acme", "x", "limit=2", "--version", "9"), "version conflict"),
        (("get", "acme", "nothing"), "there is no rule"),
        (("rollback", "acme", "x", "9"), "no version 9"),
        (("set", "*", "admin:key", "limit=1", "window=1h"), "lock operators out"),
    ]:
        ran = program.run("rules", *words)
        assert ran.returncode == 1, words
        assert said in ran.stderr, (words, ran.stderr)


def test_watch_prints_what_is_changed_meanwhile(program: Program) -> None:
    program.ok("rules", "set", "acme", "watched", "algorithm=fixed_window", "limit=1", "window=1s")
    command = [sys.executable, "-m", "holdfast.cli", "rules", "watch", "--json"]
    watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=program.environment)
    seen: list[str] = []
    assert watching.stdout is not None
    reader = threading.Thread(target=lambda out: seen.append(out.readline()), args=(watching.stdout,))
    reader.start()
    limit = 1

    def changed_and_seen() -> bool:
        nonlocal limit
        limit += 1
        program.ok("rules", "set", "acme", "watched", f"limit={limit}")
        return bool(seen)

    try:
        eventually(changed_and_seen, "a line of watch")
    finally:
        watching.terminate()
        watching.wait(20)
        reader.join()
    assert json.loads(seen[0])["rule"]["resource"] == "watched"


def test_the_documented_line_makes_rules_put_back_by_hand_new_to_everybody(tmp_path: Path) -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "limits.md"
    (line,) = [line for line in guide.read_text().splitlines() if line.startswith("holdfast rules raise-epoch")]
    command = shlex.split(line)[1:]
    program = Program(tmp_path / "state")
    missing = program.run(*command)
    assert missing.returncode == 1 and "there is no" in missing.stderr
    program.serve()
    program.ok("rules", "set", *RULE, "algorithm=token_bucket", "limit=100", "window=60s")
    running = program.run(*command)
    assert running.returncode == 1 and "in use" in running.stderr
    program.stop()
    before = _epoch(program)
    assert "new epoch" in program.ok(*command)
    once = _epoch(program)
    assert "new epoch" in program.ok(*command)
    assert before < once < _epoch(program), "also when a copy is put back twice within a second"
    program.serve()
    after = json.loads(program.ok("rules", "set", *RULE, "limit=500", "--json"))
    program.stop()
    assert (after["version"], after["epoch"]) == (2, _epoch(program))


def _epoch(program: Program) -> int:
    with closing(sqlite3.connect(program.state_dir / "limits.db")) as db:
        return int(db.execute("SELECT epoch FROM rules_head").fetchone()[0])
