"""``holdfast rules`` against a real server: every command, and its error messages."""

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
from types import SimpleNamespace
from typing import Any

import pytest
from program import Program, eventually

from holdfast.cli.context import CliContext
from holdfast.cli.rest import RestClient
from holdfast.cli.rules import commands
from holdfast.cli.rules.requests import compared, every, history_of
from holdfast.errors import OutcomeUnknown, Unavailable

RULE = ("acme", "/api/search")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    program = Program(tmp_path_factory.mktemp("rules") / "state")
    program.serve()
    yield program
    program.stop()


def test_rule_lifecycle_on_the_command_line(program: Program, tmp_path: Path) -> None:
    made = program.ok(
        "rules", "set", *RULE, "algorithm=token_bucket", "limit=100", "window=60s", "--json"
    )
    assert (json.loads(made)["limit"], json.loads(made)["version"]) == (100, 1)
    assert "limit" in program.ok("rules", "get", *RULE)
    program.ok("rules", "set", *RULE, "limit=500", "--version", "1", "--reason", "the sale")
    defaults = program.run(
        "rules", "set", "acme", "s*", "algorithm=token_bucket", "limit=1", "window=60s", "--json"
    )
    assert (
        "note: s* does not apply to Holdfast's own entry points; for those set send:*"
        in defaults.stderr
    )
    assert json.loads(defaults.stdout)["limit"] == 1
    program.ok("rules", "delete", "acme", "s*")
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
    wanted = [
        {**json.loads(file.read_text())[0], "limit": 7},
        {**json.loads(file.read_text())[0], "resource": "/new"},
    ]
    file.write_text(json.dumps(wanted))
    assert "limit" in program.ok("rules", "import", str(file), "--dry-run")
    assert json.loads(program.ok("rules", "get", *RULE, "--json"))["limit"] == 500
    program.ok("rules", "import", str(file))
    assert json.loads(program.ok("rules", "get", *RULE, "--json"))["limit"] == 7
    assert json.loads(program.ok("rules", "get", "acme", "/new", "--json"))["version"] == 1


class Narrow(Program):
    """On a terminal as narrow as most are."""

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, "COLUMNS": "80"}


def test_rules_are_readable_on_an_ordinary_terminal(tmp_path: Path) -> None:
    program = Narrow(tmp_path / "state")
    program.serve()
    program.ok(
        "rules", "set", *RULE, "algorithm=sliding_window", "limit=100", "window=5m", "mode=shadow"
    )
    listed = program.ok("rules", "ls").splitlines()
    assert any(
        line.split() == ["*", "send:user", "token_bucket", "3000/60s", "500", "1"]
        for line in listed
    ), listed
    assert any(
        line.split() == [*RULE, "sliding_window", "100/300s", "shadow", "1"] for line in listed
    ), listed
    assert "100/300s" in program.ok("rules", "history", *RULE)
    program.stop()


def test_long_lists_and_histories_are_read_to_their_end(program: Program) -> None:
    rest = CliContext(program.url, program.state_dir).as_operator()
    for resource in ("a", "b", "c", "d", "e"):
        program.ok(
            "rules", "set", "pages", resource, "algorithm=fixed_window", "limit=1", "window=1s"
        )
    listed = every(rest, "pages", page_size=2)
    assert [rule["resource"] for rule in listed] == [*"abcde"]
    assert json.loads(program.ok("rules", "ls", "--tenant", "pages", "--json")) == listed
    for limit in range(2, 6):
        program.ok("rules", "set", "pages", "a", f"limit={limit}")
    history = history_of(rest, "pages", "a", page_size=2)
    assert [change["version"] for change in history] == [5, 4, 3, 2, 1]
    assert json.loads(program.ok("rules", "history", "pages", "a", "--json")) == history
    assert "1 → 2" in program.ok("rules", "diff", "pages", "a", "1", "2")


def test_conflict_shows_the_current_rule(program: Program) -> None:
    program.ok("rules", "set", "acme", "late", "algorithm=fixed_window", "limit=1", "window=1s")
    program.ok("rules", "set", "acme", "late", "limit=7")
    for words in (
        ("set", "acme", "late", "limit=2", "--version", "1"),
        ("delete", "acme", "late", "--version", "1"),
    ):
        ran = program.run("rules", *words)
        assert ran.returncode == 1
        assert "it is version 2 now: fixed_window, 7/1s" in ran.stderr, ran.stderr


def test_watch_prints_every_change_before_it_ends(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest, now = CliContext(program.url, program.state_dir).as_operator(), 0.0
    rule = {
        "tenantID": "acme",
        "resource": "last",
        "algorithm": "fixed_window",
        "limit": 1,
        "window": "1s",
    }
    rest.post("/admin/rules", body=rule)

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        rest.ask(
            "PUT", "/admin/rules", {**rule, "limit": round(now) + 1, "expectedVersion": round(now)}
        )

    monkeypatch.setattr(
        "holdfast.cli.rules.commands.time", SimpleNamespace(sleep=sleep, monotonic=lambda: now)
    )
    seen = program.ok("rules", "watch", "--seconds", "2", "--json").splitlines()
    assert [json.loads(line)["rule"]["limit"] for line in seen] == [2, 3]


def test_burst_is_set_and_unset(program: Program) -> None:
    rule = ("acme", "bursting")
    program.ok(
        "rules", "set", *rule, "algorithm=token_bucket", "limit=100", "window=60s", "burstSize=500"
    )
    assert json.loads(program.ok("rules", "get", *rule, "--json"))["burstSize"] == 500
    assert "burstSize" not in json.loads(
        program.ok("rules", "set", *rule, "burstSize=none", "--json")
    )
    program.ok("rules", "set", *rule, "burstSize=500")
    assert "burstSize" not in json.loads(
        program.ok("rules", "set", *rule, "algorithm=fixed_window", "--json")
    )


def test_mistakes_are_reported_in_one_sentence(program: Program) -> None:
    program.ok("rules", "set", "acme", "x", "algorithm=fixed_window", "limit=1", "window=1s")
    for words, said in [
        (("set", "acme", "x", "limit=-1"), "limit must be a whole number"),
        (("set", "acme", "x", "limit=١"), "limit must be a whole number"),
        (("set", "acme", "x", "limit=none"), "limit must be a whole number"),
        (("set", "acme", "x", f"limit={'9' * 5000}"), "limit must be a whole number"),
        (("set", "acme", "x", "colour=red"), "colour"),
        (("set", "acme", "x", "limit=2", "limit=3"), "limit is given twice"),
        (("delete", "acme", "x", "--version", "0"), "expectedVersion must be"),
        (("set", "acme", "x", "limit=2", "--version", "9"), "version conflict"),
        (("get", "acme", "nothing"), "there is no rule"),
        (("rollback", "acme", "x", "9"), "no version 9"),
        (("set", "*", "admin:key", "limit=1", "window=1h"), "lock operators out"),
    ]:
        ran = program.run("rules", *words)
        assert ran.returncode == 1, words
        assert said in ran.stderr, (words, ran.stderr)


PLAIN = {"algorithm": "token_bucket", "limit": 100, "window": "1m"}


def test_use_of_a_subject_is_shown_reset_and_audited(program: Program) -> None:
    program.ok("rules", "set", "peeked", "x", "algorithm=token_bucket", "limit=100", "window=1h")
    subject = ("peeked", "x", "ann")
    assert json.loads(program.ok("rules", "peek", *subject, "--json"))["used"] == 0
    key = program.ok(
        "key", "create", "tenant", "--tenant", "peeked", "--label", "test"
    ).splitlines()[0]
    body = {"resource": "x", "subject": "ann", "cost": 80}
    RestClient(program.url, key).post("/v1/limits/check", body=body)
    standing = json.loads(program.ok("rules", "peek", *subject, "--json"))
    assert (standing["used"], standing["remaining"], standing["rule"]) == (80, 20, "peeked/x")
    assert "used" in program.ok("rules", "reset", *subject, "--reason", "their import ran twice")
    assert json.loads(program.ok("rules", "peek", *subject, "--json"))["used"] == 0
    records = (
        CliContext(program.url, program.state_dir)
        .as_operator()
        .get("/admin/audit", limit=500)["records"]
    )
    assert [(r["target"], r["reason"]) for r in records if r["action"] == "limit.reset"] == [
        ("peeked/x/ann", "their import ran twice")
    ]
    assert "no rule limits" in program.run("rules", "peek", "peeked", "elsewhere", "ann").stderr


def written(file: Path, *rules: dict[str, Any]) -> str:
    file.write_text(json.dumps(rules))
    return str(file)


def versions(program: Program, tenant: str) -> dict[str, int]:
    return {
        r["resource"]: r["version"]
        for r in json.loads(program.ok("rules", "ls", "--tenant", tenant, "--json"))
    }


def test_import_applies_the_file_and_a_second_changes_nothing(
    program: Program, tmp_path: Path
) -> None:
    file = written(
        tmp_path / "rules.json",
        {"tenantID": "git", "resource": "a", **PLAIN},
        {
            "tenantID": "git",
            "resource": "b",
            **PLAIN,
            "window": "60000ms",
            "mode": "enforce",
            "burstSize": None,
        },
    )
    assert "2 rules changed" in program.ok("rules", "import", file)
    assert "Nothing to change" in program.ok("rules", "import", file), (
        "other words for the same change nothing"
    )
    program.ok("rules", "set", "git", "a", "burstSize=500", "mode=shadow", "precision=leased")
    dry = program.ok("rules", "import", file, "--dry-run")
    assert (
        "burstSize: 500 → none, mode: shadow → enforce, precision: leased → strict" in dry
        and "dry run" in dry
    )
    assert versions(program, "git") == {"a": 2, "b": 1}
    program.ok("rules", "import", file)
    assert "Nothing to change" in program.ok("rules", "import", file)
    assert versions(program, "git") == {"a": 3, "b": 1}
    now = json.loads(program.ok("rules", "get", "git", "a", "--json"))
    assert "burstSize" not in now and (now["mode"], now["precision"]) == ("enforce", "strict")


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"limit": -1}, "rule 2 (bad second): limit must be a whole number"),
        ({"burstsize": 5}, "rule 2 (bad second): burstsize is not a field of a rule"),
        ({"resource": "first", "window": "2m"}, "rule 2 (bad first): is in the file twice"),
        ({"resource": None}, "rule 2 (bad None): resource must be a text"),
    ],
)
def test_import_with_a_bad_rule_changes_nothing(
    program: Program, tmp_path: Path, second: dict[str, Any], said: str
) -> None:
    first = {"tenantID": "bad", "resource": "first", **PLAIN}
    file = written(tmp_path / "rules.json", first, {**first, "resource": "second", **second})
    for words in (("--dry-run",), ()):
        ran = program.run("rules", "import", file, *words)
        assert ran.returncode == 1 and said in ran.stderr, (ran.stdout, ran.stderr)
    assert versions(program, "bad") == {}


def test_refused_import_changes_nothing(program: Program, tmp_path: Path) -> None:
    file = written(
        tmp_path / "rules.json",
        {"tenantID": "half", "resource": "first", **PLAIN},
        {"tenantID": "*", "resource": "admin:key", **PLAIN, "limit": 1},
        {"tenantID": "half", "resource": "third", **PLAIN},
    )
    for words in (("--dry-run",), ()):
        ran = program.run("rules", "import", file, *words)
        assert (
            ran.returncode == 1 and "this would lock operators out" in ran.stderr and not ran.stdout
        )
    assert versions(program, "half") == {}


def test_import_of_many_rules_is_one_change(program: Program, tmp_path: Path) -> None:
    """More than one body of another request could hold, and more than operators may
    call in a minute.
    """
    rules = [{"tenantID": "many", "resource": f"/{n}", **PLAIN} for n in range(2_000)]
    file = written(tmp_path / "rules.json", *rules)
    done = json.loads(program.ok("rules", "import", file, "--json"))
    assert len(done["rules"]) == 2_000 and done["rules"][0] == {
        "tenantID": "many", "resource": "/0", "new": True, "changed": {},
    }  # fmt: skip
    history = json.loads(program.ok("rules", "history", "many", "/1999", "--json"))
    assert [(c["changeID"], c["action"]) for c in history] == [(done["change_id"], "create")]


def test_import_after_a_concurrent_change_is_refused(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compared_and_overtaken(rest: RestClient, rules: Any) -> Any:
        plan = compared(rest, rules)
        program.ok(
            "rules", "set", "moved", "beside", "algorithm=fixed_window", "limit=1", "window=1s"
        )
        return plan

    monkeypatch.setattr(commands, "compared", compared_and_overtaken)
    ran = program.run(
        "rules",
        "import",
        written(tmp_path / "rules.json", {"tenantID": "moved", "resource": "a", **PLAIN}),
    )
    assert ran.returncode == 1 and "the rules have changed since" in ran.stderr
    assert versions(program, "moved") == {"beside": 1}


def test_watch_prints_changes_as_they_are_made(program: Program) -> None:
    program.ok("rules", "set", "acme", "watched", "algorithm=fixed_window", "limit=1", "window=1s")
    command = [sys.executable, "-m", "holdfast.cli", "rules", "watch", "--json"]
    watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=program.environment)
    seen: list[str] = []
    assert watching.stdout is not None
    reader = threading.Thread(
        target=lambda out: seen.append(out.readline()), args=(watching.stdout,)
    )
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


def test_watch_continues_after_a_server_outage(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest, now, waits = CliContext(program.url, program.state_dir).as_operator(), 0.0, list[float]()
    rule = {
        "tenantID": "acme",
        "resource": "meanwhile",
        "algorithm": "fixed_window",
        "limit": 1,
        "window": "1s",
    }
    rest.post("/admin/rules", body=rule)

    class Interrupted(RestClient):
        def get(self, *path: str, **query: Any) -> Any:
            if 1.0 < now < 20.0:
                raise (
                    Unavailable("nobody is there")
                    if len(waits) % 2
                    else OutcomeUnknown("no answer")
                )
            return super().get(*path, **query)

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        waits.append(seconds)
        version = len(waits)
        rest.ask("PUT", "/admin/rules", {**rule, "limit": version + 1, "expectedVersion": version})

    monkeypatch.setattr("holdfast.cli.context.RestClient", Interrupted)
    monkeypatch.setattr(
        "holdfast.cli.rules.commands.time", SimpleNamespace(sleep=sleep, monotonic=lambda: now)
    )
    ran = program.run("rules", "watch", "--seconds", "30", "--json")
    assert ran.returncode == 0, ran.stderr
    assert [json.loads(line)["version"] for line in ran.stdout.splitlines()] == list(
        range(2, len(waits) + 2)
    )
    assert waits[:7] == [1.0, 1.0, 1.0, 2.0, 4.0, 8.0, 10.0], "longer each time, up to a bound"
    assert ran.stderr.count("still watching") == 1


def test_raise_epoch_makes_restored_rules_newer_for_every_node(tmp_path: Path) -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "limits-outages.md"
    (line,) = [
        line
        for line in guide.read_text().splitlines()
        if line.startswith("holdfast rules raise-epoch")
    ]
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
