"""``holdfast ask``, ``replies`` and ``usage``: what they send, show and exit with."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
from program import ROOT
from typer.testing import CliRunner, Result

from holdfast.cli import context, replies, reply_stream
from holdfast.cli.app import app
from holdfast.cli.operations import alarms
from holdfast.cli.reply_stream import AskedReply, ReplyEvent, parse_events
from holdfast.errors import NotFound, OutcomeUnknown, Unavailable


def event(name: str, data: Any, entry_id: str = "") -> bytes:
    written = f"id: {entry_id}\n" if entry_id else ""
    return f"{written}event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def delta(text: str, entry_id: str, finish: str | None = None) -> bytes:
    chunk = {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}
    return event("delta", chunk, entry_id)


DONE = event("done", {}, "7-9")
HELLO = [delta("Hel", "7-1"), b": hb\n\n", delta("lo\n", "7-2", "stop")]
USAGE = event("usage", {"prompt_tokens": 3, "completion_tokens": 2, "estimated": True}, "7-8")


class _Response(io.BytesIO):
    """What the server wrote to one connection; then ``fault``, or the end."""

    def __init__(self, pieces: list[bytes], fault: BaseException | None, status: int) -> None:
        super().__init__(b"".join(pieces))
        self.status = status
        self._fault = fault

    def read1(self, size: int | None = -1, /) -> bytes:
        data = super().read1(3)  # cut anywhere
        if not data and self._fault is not None:
            raise self._fault
        return data


class Server:
    """Answers as a test says; each element of ``connections`` is one GET of events."""

    url = "http://server.test"

    def __init__(self) -> None:
        self.connections: list[list[bytes] | BaseException] = [[*HELLO, USAGE, DONE]]
        self.fault: BaseException | None = None
        self.last_ids: list[str | None] = []
        self.posts: list[tuple[str, Any, str | None]] = []
        self.deleted: list[str] = []
        self.post_errors: list[BaseException] = []
        self.answers: dict[str, Any] = {"/v1/models": {"data": [{"id": "fast"}, {"id": "slow"}]}}
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def get(self, *path: str, **query: Any) -> Any:
        self.asked.append(("/".join(path), query))
        answer = self.answers["/".join(path)]
        return answer(query) if callable(answer) else answer

    def post(self, *path: str, body: Mapping[str, Any], key: str | None = None) -> Any:
        self.posts.append(("/".join(path), body, key))
        if self.post_errors:
            raise self.post_errors.pop(0)
        return self.answers.get("/".join(path), {"id": "reply_1"})

    def delete(self, *path: str, **query: Any) -> None:
        self.deleted.append("/".join(path))

    @contextmanager
    def open(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[_Response]:
        assert (method, path) == ("GET", "/v1/replies/reply_1/events")
        self.last_ids.append((headers or {}).get("Last-Event-ID"))
        connection = self.connections.pop(0)
        if isinstance(connection, BaseException):
            raise connection
        fault = self.fault if not self.connections else None
        yield _Response(connection, fault, 200 if connection else 204)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr(context.CliContext, "as_user", lambda *_: server)
    monkeypatch.setattr(context.CliContext, "as_operator", lambda *_: server)
    monkeypatch.setattr(reply_stream.time, "sleep", lambda seconds: None)
    return server


def run(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, [*arguments], input=stdin, prog_name="holdfast")


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_read_however_they_are_cut(size: int) -> None:
    written = b"".join([event("queued", {"position": 2, "eta_seconds": None}), *HELLO, DONE])
    chunks = [written[at : at + size] for at in range(0, len(written), size)]
    events = list(parse_events(chunks))
    assert [(e.name, e.id) for e in events] == [
        ("queued", ""),
        ("delta", "7-1"),
        ("delta", "7-2"),
        ("done", "7-9"),
    ]
    assert list(parse_events([written[:-1]]))[-1].id == "7-2", "half an event is none"


def test_ask_prints_the_text_and_nothing_else(server: Server) -> None:
    done = run("ask", "Hi?", "--system", "Be brief.")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "Hello\n", "")
    [(path, body, key)] = server.posts
    assert path == "/v1/replies" and key
    assert body == {
        "model": "fast",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi?"},
        ],
    }
    assert server.deleted == [], "what has ended is not cancelled"


@pytest.mark.parametrize("arguments", [("ask", "--no-stream"), ("ask",)])
def test_ask_reads_the_question_from_standard_input(
    server: Server, arguments: tuple[str, ...]
) -> None:
    done = run(*arguments, stdin="How?\nWhy?\n")
    assert (done.exit_code, done.stdout) == (0, "Hello\n")
    assert server.posts[0][1]["messages"] == [{"role": "user", "content": "How?\nWhy?\n"}]


@pytest.mark.parametrize("text", ["", "  \n"])
def test_empty_question_is_not_asked(server: Server, text: str) -> None:
    done = run("ask", stdin=text)
    assert done.exit_code == 1 and "nothing to ask" in done.stderr
    assert server.posts == []


def test_ask_as_json_has_text_usage_and_reason(server: Server) -> None:
    done = run("ask", "Hi?", "--model", "slow", "--json")
    assert json.loads(done.stdout) == {
        "id": "reply_1",
        "model": "slow",
        "text": "Hello\n",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "estimated": True},
    }


@pytest.mark.parametrize("as_json", [False, True])
def test_reply_that_fails_exits_1_and_says_why_after_its_text(
    server: Server, as_json: bool
) -> None:
    failed = event("failed", {"code": "upstream_lost", "message": "the connection broke"}, "7-2")
    server.connections = [[delta("Hel", "7-1"), failed]]
    done = run("ask", "Hi?", *(["--json"] if as_json else []))
    assert done.exit_code == 1
    if as_json:
        assert done.stdout == ""
        assert json.loads(done.stderr)["error"] == {
            "code": "upstream_lost",
            "message": "the connection broke",
            "retryable": True,
        }
    else:
        assert done.stdout == "Hel\n"
        assert done.stderr == "Error: the connection broke (upstream_lost)\n"


@pytest.mark.parametrize(
    "fault", [None, OutcomeUnknown("reset"), Unavailable("refused"), Unavailable("stopping")]
)
def test_dropped_reply_goes_on_after_its_last_event(
    server: Server, fault: BaseException | None
) -> None:
    server.connections = [
        [delta("a", "7-1"), delta("b", "7-2"), b'event: delta\nid: 7-3\ndata: {"cho'],
        *([fault] if fault else []),
        [delta("c", "7-3"), DONE],
    ]
    done = run("ask", "Hi?")
    assert (done.exit_code, done.stdout) == (0, "abc\n")
    assert server.last_ids == [None, *(["7-2"] if fault else []), "7-2"]
    assert len(server.posts) == 1, "nothing is asked twice"


def test_reply_whose_end_was_its_last_event_is_complete(server: Server) -> None:
    """204: there is nothing after what we have."""
    server.connections = [[delta("a", "7-1")], []]
    assert run("ask", "Hi?").stdout == "a\n"


def test_reply_that_is_gone_after_a_drop_is_an_error(server: Server) -> None:
    server.connections = [[delta("a", "7-1")], NotFound("there is no such reply")]
    done = run("ask", "Hi?")
    assert (done.exit_code, done.stdout) == (1, "a\n")
    assert "there is no such reply" in done.stderr


def test_reply_is_given_up_when_it_cannot_be_read_again_in_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 10_000, 10))
    monkeypatch.setattr(reply_stream.time, "monotonic", lambda: next(now))
    server.connections = [Unavailable("there is no server")] * 100
    done = run("ask", "Hi?")
    assert done.exit_code == 1 and "there is no server" in done.stderr
    assert len(server.connections) == 96, "30 s of trying"


def test_request_of_unknown_outcome_is_repeated_under_its_key(server: Server) -> None:
    server.post_errors = [OutcomeUnknown("no answer"), OutcomeUnknown("no answer")]
    assert run("ask", "Hi?").stdout == "Hello\n"
    assert len({key for _, _, key in server.posts}) == 1 and len(server.posts) == 3
    server.post_errors = [OutcomeUnknown("no answer")] * 9
    assert run("ask", "Hi?").exit_code == 1


def test_interrupted_reply_is_cancelled_and_exits_130(server: Server) -> None:
    server.connections, server.fault = [[delta("a", "7-1")]], KeyboardInterrupt()
    done = run("ask", "Hi?")
    assert (done.exit_code, done.stdout, done.stderr) == (130, "a\n", "Cancelled.\n")
    assert server.deleted == ["/v1/replies/reply_1"]


def test_reply_whose_reader_left_is_cancelled(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``holdfast ask … | head -1``."""

    def leave(self: object, event: ReplyEvent) -> None:
        raise RuntimeError("the pipe is closed")

    monkeypatch.setattr(replies._ReplyScreen, "show", leave)
    assert run("ask", "Hi?").exit_code == 1
    assert server.deleted == ["/v1/replies/reply_1"]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[ReplyEvent]], tuple[str, str]]:
    """Shows events on a terminal; what was written to stdout and stderr."""

    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    def show(events: list[ReplyEvent]) -> tuple[str, str]:
        out, err = Tty(), Tty()
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr("sys.stderr", err)
        screen = replies._ReplyScreen(prints=True, streams=True)
        for each in events:
            screen.show(each)
        screen.end()
        return out.getvalue(), err.getvalue()

    return show


def test_terminal_shows_the_place_in_the_queue_until_the_first_token(
    terminal: Callable[[list[ReplyEvent]], tuple[str, str]],
) -> None:
    out, err = terminal(
        [
            ReplyEvent("queued", {"position": 4, "eta_seconds": None}),
            ReplyEvent("queued", {"position": 1, "eta_seconds": 6.4}),
            ReplyEvent("dropped", {"message": "reset"}),
            ReplyEvent("delta", {"choices": [{"delta": {"content": "Hi"}}]}),
        ]
    )
    clear = "\r\x1b[K"
    assert err.split(clear) == [
        "",
        "waiting: place 4 in the queue",
        "waiting: place 1 in the queue, about 6 s",
        "the connection was lost; connecting again",
        "",
    ]
    assert out == "Hi\n"


def test_terminal_gets_no_control_characters_from_a_model(
    terminal: Callable[[list[ReplyEvent]], tuple[str, str]],
) -> None:
    out, _ = terminal(
        [ReplyEvent("delta", {"choices": [{"delta": {"content": "a\x1b]0;x\x07b\tc\nd"}}]})]
    )
    assert out == "a�]0;x�b\tc\nd\n"


REPLY = {
    "reply_id": "reply_1", "tenant": "acme", "owner": "ann", "owner_kind": "user",
    "kind": "plain", "surface": "chat", "model": "fast", "state": "waiting", "age_seconds": 2.5,
    "node": "node-a", "readers": 1, "entries": 1, "position": 3,
}  # fmt: skip


def test_replies_are_listed_with_their_place_and_the_other_nodes(server: Server) -> None:
    key = {**REPLY, "reply_id": "reply_2", "owner_kind": "key", "state": "running", "position": 0}
    page = {"node": "node-a", "nodes": ["node-a", "node-b"], "replies": [REPLY, key], "next": None}
    server.answers["/admin/replies"] = page
    done = run("replies", "ls", "--tenant", "acme", "--state", "waiting")
    _, first, second, others = done.stdout.splitlines()
    assert first.split()[:6] == ["reply_1", "waiting", "3", "acme", "ann", "plain"]
    assert second.split()[:6] == ["reply_2", "running", "–", "acme", "key", "ann"]
    assert others == "Of node-a; ask the others with --url: node-b"
    assert server.asked[0][1]["tenant"] == "acme" and server.asked[0][1]["limit"] == 100
    assert json.loads(run("replies", "ls", "--json").stdout) == page


def test_reply_is_shown_and_cancelled(server: Server) -> None:
    server.answers["/admin/replies/reply_1"] = REPLY
    assert "tenant       acme" in run("replies", "show", "reply_1").stdout
    for cancelled, said in [(True, "cancelled\n"), (False, "it had ended already\n")]:
        server.answers["/admin/replies/reply_1/cancel"] = {"cancelled": cancelled}
        assert run("replies", "cancel", "reply_1", "--reason", "runaway").stdout == said
    assert server.posts[0][:2] == ("/admin/replies/reply_1/cancel", {"reason": "runaway"})


def usage_row(user: str, replies: int) -> dict[str, Any]:
    return {
        "day": "2026-05-31", "tenant": "acme", "user": user, "model": "fast",
        "provider": "openai", "replies": replies, "prompt_tokens": 10 * replies,
        "completion_tokens": 5 * replies, "estimated": 0,
    }  # fmt: skip


def test_usage_is_added_up_over_all_pages(server: Server) -> None:
    rows = [usage_row("ann", 1), usage_row("bob", 2), usage_row("", 4)]

    def page(query: Mapping[str, Any]) -> dict[str, Any]:
        at = int(query["after"] or 0)
        more = str(at + 1) if at + 1 < len(rows) else None
        return {"node": "node-a", "rows": rows[at : at + 1], "next": more}

    server.answers["/admin/usage"] = page
    done = run("usage", "--day", "2026-05-31", "--tenant", "acme")
    header, first, *_, erased, total = done.stdout.splitlines()
    assert header.split()[-4:] == ["replies", "prompt", "completion", "estimated"]
    assert first.split() == ["2026-05-31", "acme", "ann", "fast", "openai", "1", "10", "5", "0"]
    assert erased.split()[2] == "–"
    assert total.split() == ["total", "7", "70", "35", "0"]
    asked = server.asked[0][1]
    assert (asked["since"], asked["until"], asked["tenant"]) == ("2026-05-31", "2026-05-31", "acme")
    shown = json.loads(run("usage", "--json").stdout)
    assert (shown["node"], shown["rows"], shown["total"]["replies"]) == ("node-a", rows, 7)


def test_usage_takes_a_day_or_a_period(server: Server) -> None:
    done = run("usage", "--day", "2026-05-31", "--since", "2026-05-01")
    assert done.exit_code == 1 and "--day" in done.stderr
    server.answers["/admin/usage"] = {"node": "node-a", "rows": [], "next": None}
    assert run("usage").stdout == "No replies were made in that time.\n"


def test_asked_reply_is_named_safely_in_its_path(server: Server) -> None:
    AskedReply(server, "a/b?c").cancel()  # type: ignore[arg-type]
    assert server.deleted == ["/v1/replies/a%2Fb%3Fc"]


WELL = {
    "pools": {"default": {"active": 0, "waiting": 0, "state": "critical"}},
    "shared_pool": "up",
    "providers": [{"name": "openai", "breaker": "closed", "trouble": ""}],
    "uncounted_runs": 0,
}


def test_status_alarms_name_the_runbook_of_what_is_in_trouble() -> None:
    found = alarms({"trouble": {"store": "full", "replies": "full", "usage": "full"}})
    pages = [alarm.rpartition("/")[2] for alarm in found]
    assert pages == ["breaker-open.md)", *["replies-not-resumable.md)"] * 2]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"shared_pool": "down"}, "replies-redis-down.md"),
        (
            {"pools": {"openai": {"active": 9, "waiting": 4000, "state": "exhausted"}}},
            "openai of replies is exhausted, 4,000 wait",
        ),
        (
            {"providers": [{"name": "openai", "breaker": "open", "trouble": "no connection"}]},
            "openai does not answer: no connection",
        ),
        ({"uncounted_runs": 7}, "what 7 replies used"),
    ],
)
def test_status_alarms_about_replies_and_names_the_runbook(
    changed: dict[str, Any], said: str
) -> None:
    found = alarms({"replies": {**WELL, **changed}})
    assert len(found) == bool(said)
    for alarm in found:
        assert said in alarm
        page = alarm.rpartition("(")[2].removesuffix(")")
        assert (ROOT / page).exists()
