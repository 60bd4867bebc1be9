"""Messages over REST: pages, sends, redaction, delivery status."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from api_rig import Rest, error_of, serving
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import telemetry
from holdfast.api.deps import ApiSettings
from holdfast.api.messages import _page
from holdfast.errors import HoldfastError, OutcomeUnknown, ServerBusy, Unavailable
from holdfast.history.history import HistorySettings
from holdfast.limits.rules import Rule
from holdfast.message import Chat, Message, Outcome, Page, User, Watermark
from holdfast.session.settings import PageSettings
from holdfast.store.commands import CommandContext, Retain
from holdfast.store.memory import MemoryStore
from holdfast.wire.frames import SendBody


async def chat_of(rest: Rest, messages: int) -> str:
    chat = await rest.chat("alice", ["bob"])
    for n in range(1, messages + 1):
        assert (await rest.send(chat, f"m{n}", f"k{n}")).json()["sequence"] == n
    return chat


@pytest.mark.parametrize(
    ("query", "sequences", "has_older", "has_newer"),
    [
        ("", [1, 2, 3, 4, 5, 6, 7, 8, 9], False, False),
        ("?limit=3", [7, 8, 9], True, False),
        ("?before=4", [1, 2, 3], False, True),
        ("?before=4&limit=2", [2, 3], True, True),
        ("?before=1", [], False, True),
        ("?before=100", [1, 2, 3, 4, 5, 6, 7, 8, 9], False, False),
        ("?after=0&limit=2", [1, 2], False, True),
        ("?after=6", [7, 8, 9], True, False),
        ("?after=9", [], True, False),
        ("?after=99", [], True, False),
        ("?around=5&limit=4", [3, 4, 5, 6], True, True),
        ("?around=5&limit=1", [5], True, True),
        ("?around=1&limit=4", [1, 2], False, True),
        ("?around=9&limit=4", [7, 8, 9], True, False),
        ("?around=5&limit=500", [1, 2, 3, 4, 5, 6, 7, 8, 9], False, False),
    ],
)
async def test_a_page_lies_before_after_or_around_a_sequence(
    query: str, sequences: list[int], has_older: bool, has_newer: bool
) -> None:
    async with serving() as rest:
        chat = await chat_of(rest, 9)
        page = (
            await rest.ask("GET", f"/v1/chats/{chat}/messages{query}", rest.token("bob"))
        ).json()
        assert [m["sequence"] for m in page["messages"]] == sequences
        assert (page["has_older"], page["has_newer"], page["head"]) == (has_older, has_newer, 9)


@pytest.mark.parametrize("query", ["", "?after=0", "?after=99", "?before=7", "?around=5"])
async def test_a_chat_without_a_message_has_none_on_either_side(query: str) -> None:
    async with serving() as rest:
        chat = await rest.chat()
        page = (
            await rest.ask("GET", f"/v1/chats/{chat}/messages{query}", rest.token("alice"))
        ).json()
        assert (page["messages"], page["has_older"], page["has_newer"]) == ([], False, False)


async def test_a_page_ends_at_its_bytes_and_says_that_there_is_more() -> None:
    async with serving(pages=PageSettings(max_bytes=9000)) as rest:
        chat = await rest.chat()
        for n in range(4):
            await rest.send(chat, "x" * 4000, f"k{n}")
        page = (
            await rest.ask("GET", f"/v1/chats/{chat}/messages?after=0", rest.token("alice"))
        ).json()
        assert 1 <= len(page["messages"]) < 4 and page["has_newer"]


async def test_the_limits_of_the_sockets_hold_over_rest() -> None:
    async with serving(pages=PageSettings(max_messages=2), content_bytes_max=10) as rest:
        chat = await chat_of(rest, 3)
        page = (
            await rest.ask("GET", f"/v1/chats/{chat}/messages?after=0&limit=500", rest.token("bob"))
        ).json()
        assert len(page["messages"]) == 2 and page["has_newer"]
        assert error_of(await rest.send(chat, "x" * 11, "k")) == (413, "MESSAGE_TOO_LARGE")


async def test_a_page_of_a_chat_whose_beginning_was_deleted_knows_where_it_begins() -> None:
    async with serving() as rest:
        chat = await chat_of(rest, 5)
        act = CommandContext(
            User("acme", "key_1"), "2026-01-01T00:00:00.000Z", "msg_1", operator=True
        )
        await rest.store.change(Retain(act, chat, 3))
        page = (
            await rest.ask("GET", f"/v1/chats/{chat}/messages?after=2", rest.token("bob"))
        ).json()
        assert [m["sequence"] for m in page["messages"]] == [3, 4, 5] and page["has_older"] is False


@pytest.mark.parametrize(
    "query", ["?before=2&after=1", "?around=1&before=2", "?limit=0", "?before=0", "?after=-1",
              "?after=1e2", "?after=null", "?limit=5&limit=6", "?nonsense=1", "?after=",
              "?after=99999999999999999999", "?after=%00"]
)  # fmt: skip
async def test_a_place_that_is_none_is_refused(query: str) -> None:
    async with serving() as rest:
        chat = await rest.chat()
        answer = await rest.ask("GET", f"/v1/chats/{chat}/messages{query}", rest.token("alice"))
        assert error_of(answer) == (400, "INVALID_MESSAGE")


def numbered(sequences: range) -> list[Message]:
    return [Message(f"m{n}", "c", n, "text", "a", None, "", "text/plain", "") for n in sequences]


@given(st.integers(0, 12), st.integers(1, 12), st.integers(1, 14), st.integers(1, 14))
@settings(max_examples=300)
def test_has_older_and_has_newer_are_exact_around_any_place(
    head: int, first: int, around: int, limit: int
) -> None:
    first = min(first, head + 1)
    stored = range(first, head + 1)
    half = limit // 2
    before = [n for n in stored if n < around][-half:] if half else []
    after = [n for n in stored if n >= around][: limit - half]
    chat = Chat("c", "t", "group", "", 1, head, first, None, "a", "")
    older = Page("c", 1, numbered(range(before[0], before[-1] + 1)) if before else [], 0,
                 bool(before and before[0] > first), head) if half else None  # fmt: skip
    newer = Page("c", 1, numbered(range(after[0], after[-1] + 1)) if after else [], 0,
                 bool(after and after[-1] < head), head)  # fmt: skip
    page = _page(chat, older, newer, around - 1)
    shown = [m.sequence for m in page.messages]
    assert shown == before + after
    if shown:
        assert page.has_older == (shown[0] > first) and page.has_newer == (shown[-1] < head)


async def test_a_retried_send_gets_its_first_answer_marked_deduplicated() -> None:
    async with serving() as rest:
        chat = await rest.chat()
        first, again = await rest.send(chat, "hi", "k1"), await rest.send(chat, "hi", "k1")
        assert (first.status_code, again.status_code) == (201, 200)
        assert again.json() == {**first.json(), "deduplicated": True}
        assert error_of(await rest.send(chat, "other", "k1")) == (409, "IDEMPOTENCY_KEY_REUSED")


@pytest.mark.parametrize(
    ("body", "key", "expected"),
    [
        ({"content": ""}, "k", (400, "INVALID_MESSAGE")),
        ({"content": "é" * 2049}, "k", (413, "MESSAGE_TOO_LARGE")),
        ({"content": "x", "content_type": "text/html"}, "k", (415, "INVALID_CONTENT_TYPE")),
        ({"content": 7}, "k", (400, "INVALID_MESSAGE")),
        ({"content": "x", "sender_id": "bob"}, "k", (400, "INVALID_MESSAGE")),
        ({"content": "x", "tenant": "evil"}, "k", (400, "INVALID_MESSAGE")),
        ({}, "k", (400, "INVALID_MESSAGE")),
        ([], "k", (400, "INVALID_MESSAGE")),
        ({"content": "x"}, None, (400, "INVALID_MESSAGE")),
        ({"content": "x"}, "k" * 65, (400, "INVALID_MESSAGE")),
        ({"content": "x"}, "a b", (400, "INVALID_MESSAGE")),
        ({"content": "x"}, "", (400, "INVALID_MESSAGE")),
    ],
)
async def test_a_bad_send_is_refused_by_name(
    body: object, key: str | None, expected: tuple[int, str]
) -> None:
    async with serving() as rest:
        chat = await rest.chat()
        headers = {} if key is None else {"Idempotency_Key": key}
        answer = await rest.ask(
            "POST", f"/v1/chats/{chat}/messages", rest.token("alice"), body, **headers
        )
        assert error_of(answer) == expected
        assert answer.json()["error"]["outcome"] == "rejected"
        assert (await rest.store.inspect(chat)).count == 0


async def test_exactly_4096_bytes_are_taken() -> None:
    async with serving() as rest:
        assert (await rest.send(await rest.chat(), "é" * 2048, "k")).status_code == 201


class Answering:
    """An intake that answers as the test says, or never."""

    def __init__(self, outcome: HoldfastError | None) -> None:
        self.outcome = outcome

    def submit(
        self,
        body: SendBody,
        sender: User,
        source: str,
        deadline: float,
        answer: Callable[[Outcome], None],
    ) -> None:
        if self.outcome is not None:
            answer(self.outcome)


@pytest.mark.parametrize(
    ("outcome", "status", "code", "said", "wait"),
    [
        (OutcomeUnknown("?"), 503, "SERVICE_UNAVAILABLE", "unknown", "1"),
        (
            Unavailable("down", retry_after_seconds=12.3),
            503,
            "SERVICE_UNAVAILABLE",
            "rejected",
            "13",
        ),
        (ServerBusy("full"), 503, "SERVER_BUSY", "rejected", "1"),
        (None, 503, "SERVICE_UNAVAILABLE", "unknown", "1"),
    ],
)
async def test_a_send_that_was_not_stored_says_so_and_one_nobody_knows_of_says_that(
    outcome: HoldfastError | None, status: int, code: str, said: str, wait: str
) -> None:
    async with serving(ApiSettings(request_seconds_max=0.01), sends=Answering(outcome)) as rest:
        answer = await rest.send(await rest.chat(), "hi", "k1")
        assert error_of(answer) == (status, code)
        assert (
            answer.json()["error"]["outcome"] == said
            and answer.json()["error"]["retryable"] is True
        )
        assert answer.headers["Retry-After"] == wait


async def test_a_halted_chat_answers_503_with_when_to_come_back() -> None:
    async with serving() as rest:
        chat = await rest.chat()
        await rest.ask("POST", f"/admin/chats/{chat}/halt", rest.admin_key(), {"reason": "a test"})
        answer = await rest.send(chat, "hi", "k1")
        assert error_of(answer) == (503, "CHAT_HALTED") and answer.headers["Retry-After"] == "30"


async def test_redaction_takes_the_content_and_leaves_the_place_and_the_key() -> None:
    async with serving() as rest:
        chat = await chat_of(rest, 2)
        answer = await rest.ask("DELETE", f"/v1/chats/{chat}/messages/1", rest.token("alice"))
        assert answer.status_code == 200
        page = (await rest.ask("GET", f"/v1/chats/{chat}/messages", rest.token("bob"))).json()
        assert [(m["sequence"], m["content"]) for m in page["messages"]] == [(1, ""), (2, "m2")]
        assert (await rest.send(chat, "m1", "k1")).json()["deduplicated"] is True


@pytest.mark.parametrize("sequence", ["0", "99", "-1", "one", "1.0", "9" * 40, "%F0%9F%98%80"])
async def test_a_message_that_is_not_there_is_not_found(sequence: str) -> None:
    async with serving() as rest:
        chat = await chat_of(rest, 1)
        path = f"/v1/chats/{chat}/messages/{sequence}"
        assert error_of(await rest.ask("DELETE", path, rest.token("alice"))) == (404, "NOT_FOUND")
        assert error_of(await rest.ask("GET", path + "/status", rest.token("alice"))) == (
            404,
            "NOT_FOUND",
        )


async def test_the_sender_sees_who_has_a_message_and_who_has_read_it() -> None:
    async with serving() as rest:
        chat = await rest.chat("alice", ["bob", "carl", "dora"])
        for n in range(3):
            await rest.send(chat, f"m{n}", f"k{n}")

        def mark(name: str, device: str, delivered: int, read: int) -> Watermark:
            return Watermark(User("acme", name), device, chat, 1, delivered, read)

        await rest.store.mark(
            [mark("bob", "phone", 3, 2), mark("bob", "desk", 1, 0), mark("carl", "phone", 2, 0),
             mark("dora", "phone", 1, 1), mark("alice", "phone", 3, 3)]
        )  # fmt: skip
        path = f"/v1/chats/{chat}/messages/2/status"
        status = (await rest.ask("GET", path, rest.token("alice"))).json()
        assert (status["delivered"], status["read"]) == (["bob", "carl"], ["bob"])


class Hanging(MemoryStore):
    """A store whose reads never come back."""

    async def chat(self, chat_id: str, reader: User | None = None) -> Chat:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


async def test_a_read_that_meets_its_deadline_is_a_retryable_error() -> None:
    async with serving(store=Hanging(), reads=HistorySettings(read_timeout_seconds=0.01)) as rest:
        answer = await rest.ask("GET", "/v1/chats/chat_1/messages", rest.token("alice"))
        assert error_of(answer) == (503, "SERVICE_UNAVAILABLE")
        assert "outcome" not in answer.json()["error"] and answer.headers["Retry-After"] == "1"


def answered() -> dict[str, float]:
    """How many sends had each answer, so far."""
    samples = telemetry.samples(["ingest_sends_total"])["ingest_sends_total"]
    return {dict(labels)["answer"]: count for labels, count in samples.items()}


async def counted(rest: Rest, who: str | None, **request: Any) -> tuple[int, dict[str, float]]:
    """The status of a send, and which answers were counted for it."""
    before, path = answered(), f"/v1/chats/{request.pop('chat', 'chat_x')}/messages"
    status = (await rest.ask("POST", path, who, **request)).status_code
    now = answered()
    return status, {each: now[each] - before[each] for each in now if now[each] != before[each]}


async def test_send_that_is_refused_before_its_endpoint_counts_as_a_send() -> None:
    once = Rule("*", "rest:user", "token_bucket", 1, 60.0, burst_size=2)
    async with serving(rules=[once]) as rest:
        chat, body = await rest.chat("alice"), {"content": "hello"}
        alice, bob, eve = (rest.token(each) for each in ("alice", "bob", "eve"))
        persisted = await counted(rest, alice, chat=chat, json=body, idempotency_key="1")
        assert persisted == (201, {"persisted": 1})
        limited = await counted(rest, alice, chat=chat, json=body, idempotency_key="2")
        assert limited == (429, {"refused": 1})
        assert await counted(rest, bob, json=body) == (400, {"refused": 1}), "no key"
        assert await counted(rest, bob, json={}, idempotency_key="1") == (400, {"refused": 1})
        reader = rest.token("carl", scopes=["chats:read"])
        assert await counted(rest, reader, json=body) == (403, {"refused": 1})
        rest.deps.limits.entry_points.decide = refuse_all  # type: ignore[method-assign]
        turned_away = await counted(rest, eve, json=body, idempotency_key="1")
        assert turned_away == (503, {"turned_away": 1})


async def refuse_all(*_: Any) -> Any:
    raise Unavailable("the counters do not answer")


async def test_send_without_a_credential_is_no_send() -> None:
    async with serving() as rest:
        assert await counted(rest, None, json={"content": "hello"}) == (401, {})
        assert await counted(rest, "no token", json={"content": "hello"}) == (401, {})
        asked = await rest.ask("POST", "/v1/chats", rest.token("alice"), json={})
        before = answered()
        assert asked.status_code == 400 and answered() == before, "another endpoint"
