"""``holdfast verify`` against a real server: what it judges, what it leaves, and that a
broken promise is seen.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from program import Program

from holdfast.cli.rest import RestClient
from holdfast.errors import Unavailable

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    program = Program(tmp_path_factory.mktemp("verify") / "state")
    program.serve()
    yield program
    program.stop()


@pytest.fixture(scope="module")
def saved(program: Program, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The history of one trial, which kept every promise and left its chats empty."""
    path = tmp_path_factory.mktemp("history") / "history.jsonl"
    said = json.loads(
        program.ok("verify", program.url, "--seconds", "2", "--history", str(path), "--json")
    )
    assert said["kept"] and said["operations"] > 10
    assert {p["number"] for p in said["promises"] if p["kept"] and p["facts"]} == {
        1,
        2,
        3,
        4,
        5,
        7,
        8,
        9,
        12,
    }
    assert len(said["left"]) == 2
    for left in said["left"]:
        assert (
            "holdfast verify 20" in left and "an empty chat, without members and messages" in left
        )
        shown = json.loads(program.ok("chat", "inspect", left.split()[0], "--json"))
        assert shown["count"] == 0 and shown["chat"]["head"] > 0, "deleted, and numbered on"
    return path


def test_a_saved_history_is_judged_again_without_a_server(saved: Path, tmp_path: Path) -> None:
    nobody = Program(tmp_path / "state")
    assert "nobody sees another's data" in nobody.ok("verify", "--replay", str(saved))
    assert json.loads(nobody.ok("verify", "--replay", str(saved), "--json"))["kept"]


def _lose_a_message(lines: Lines) -> None:
    chat = next(line for line in lines if line["event"] == "chat")
    del chat["messages"][0]


def _serve_the_stranger(lines: Lines) -> None:
    asked = [
        line
        for line in lines
        if line.get("client") == "stranger over REST" and line.get("verb") == "send"
    ]
    end = next(
        line for line in lines if line.get("op") == asked[0]["op"] and line["event"] == "fail"
    )
    end.clear()
    end.update(
        {
            "event": "ok",
            "at": asked[0]["at"],
            "op": asked[0]["op"],
            "acked": {"sequence": 1, "message_id": "m"},
        }
    )


def _close_without_a_word(lines: Lines) -> None:
    lines[:] = [line for line in lines if line["event"] != "closing"]


def _answer_late(lines: Lines) -> None:
    sent = next(line for line in lines if line.get("verb") == "send")
    sent["at"] -= 6


@pytest.mark.parametrize(
    ("change", "number"),
    [
        (_lose_a_message, 1),
        (_serve_the_stranger, 12),
        (_close_without_a_word, 7),
        (_answer_late, 8),
    ],
)
def test_broken_promise_is_printed_and_sets_the_exit_code(
    program: Program, saved: Path, tmp_path: Path, change: Callable[[Lines], None], number: int
) -> None:
    lines = [json.loads(line) for line in saved.read_text().splitlines()]
    change(lines)
    broken = tmp_path / "broken.jsonl"
    broken.write_text("\n".join(map(json.dumps, lines)))
    done = program.run("verify", "--replay", str(broken), "--json")
    assert done.returncode == 1
    said = json.loads(done.stdout)
    assert not said["kept"]
    assert number in [p["number"] for p in said["promises"] if not p["kept"] and p["violations"]]
    assert "BROKEN" in program.run("verify", "--replay", str(broken)).stdout


class _Proxy(BaseHTTPRequestHandler):
    """It denies everything, with a page of its own."""

    def do_GET(self) -> None:
        self.send_response(403)
        self.end_headers()
        self.wfile.write(b"<html>403 Forbidden</html>")

    def log_message(self, *_: object) -> None:
        pass


def test_proxy_that_lets_no_operator_through_is_told_from_a_wrong_address() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        rest = RestClient(f"http://127.0.0.1:{proxy.server_port}", "hf_admin_key")
        with pytest.raises(Unavailable, match=r"lets no operator through .*a node's own address"):
            rest.get("/admin/chats", "chat_1")
        with pytest.raises(Unavailable, match="is no Holdfast server"):
            rest.get("/v1/chats")
        proxy.shutdown()


def test_a_tenant_key_mints_its_own_users(program: Program) -> None:
    key = json.loads(
        program.ok("key", "create", "tenant", "--tenant", "acme", "--label", "verify", "--json")
    )
    said = json.loads(
        program.ok("verify", program.url, "--token", key["secret"], "--seconds", "1", "--json")
    )
    assert said["kept"] and 12 in {p["number"] for p in said["promises"]}


def test_verify_with_a_user_token_has_no_stranger(program: Program) -> None:
    token = program.ok("token", "--user", "alice").strip()
    said = json.loads(
        program.ok("verify", program.url, "--token", token, "--seconds", "1", "--json")
    )
    assert said["kept"] and 12 not in {p["number"] for p in said["promises"]}


def test_the_same_seed_draws_the_same_first_sends(program: Program, tmp_path: Path) -> None:
    def first_keys(name: str) -> list[str]:
        path = tmp_path / name
        program.ok("verify", program.url, "--seconds", "1", "--seed", "7", "--history", str(path))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert lines[0]["seed"] == 7
        return [
            line["key"]
            for line in lines
            if line.get("verb") == "send" and "stranger" not in line["client"]
        ][:3]

    assert first_keys("a") == first_keys("b")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--token", "hf_admin_x"), "an admin key cannot talk"),
        (("--replay", "nowhere.jsonl"), "nowhere.jsonl cannot be judged"),
        (("http://127.0.0.1:1", "--seconds", "1"), "there is no server at http://127.0.0.1:1"),
        (("http://127.0.0.1:1", "--replay", "x"), "leave the URL and --history out"),
        (("--seconds", "0"), "--seconds"),
        (("nonsense",), "is no server address"),
    ],
)
def test_impossible_run_is_refused_with_the_reason(
    program: Program, arguments: tuple[str, ...], says: str
) -> None:
    done = program.run("verify", *arguments)
    assert done.returncode != 0 and says in done.stderr


def test_replay_of_a_file_that_is_no_history_is_refused(program: Program, tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"event": "something else"}\n')
    done = program.run("verify", "--replay", str(tmp_path / "x"))
    assert done.returncode == 1 and "not a history of format 1" in done.stderr
