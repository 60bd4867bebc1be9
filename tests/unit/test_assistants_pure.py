"""Assistants: triggers, prompts, contents and verdicts, from values alone."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from holdfast.message import Message
from holdfast.streaming.assistants.content import (
    CONTENT_BYTES_MAX,
    CUT_MARK,
    ReplyContent,
    text_of,
)
from holdfast.streaming.assistants.jobs import (
    JOB_TYPE,
    AssistantNotice,
    draft_of,
    failure_of,
    per_destination_max,
    with_assistants,
)
from holdfast.streaming.assistants.prompt import CONTEXT_BYTES_MAX, prompt, request_fields
from holdfast.streaming.assistants.triggers import Assistants, mentions, reply_id_of, triggers
from holdfast.streaming.reply import ReplyDelta, ReplyDone, ReplyError
from holdfast.streaming.settings import AssistantSettings
from holdfast.work.failures import JobPostponed, classify
from holdfast.work.job import FailureAction, Job, OnFailure, Policies, Reason, decide


def assistant(**given: Any) -> AssistantSettings:
    return AssistantSettings(**{"tenant": "acme", "user": "bot", "model": "tiny", **given})


def message(text: str, sender: str = "ann", sequence: int = 1, **given: Any) -> Message:
    fields = {
        "message_id": f"msg_{sequence}",
        "chat_id": "chat_1",
        "sequence": sequence,
        "kind": "text",
        "sender_id": sender,
        "client_message_id": f"c{sequence}",
        "content": text,
        "content_type": "text/plain",
        "created_at": "2026-01-01T00:00:00.000Z",
    }
    return Message(**{**fields, **given})


@pytest.mark.parametrize(
    ("trigger", "kind", "text", "triggered"),
    [
        ("auto", "direct", "hello", True),
        ("auto", "group", "hello", False),
        ("auto", "group", "hello @bot", True),
        ("always", "group", "hello", True),
        ("mention", "direct", "hello", False),
        ("mention", "direct", "@bot, hello", True),
    ],
)
def test_trigger_decides_by_chat_and_mention(
    trigger: Any, kind: Any, text: str, triggered: bool
) -> None:
    assert triggers(assistant(trigger=trigger), message(text), kind) is triggered


@pytest.mark.parametrize("text", ["@bot", "hi @bot!", "(@bot)", "@BOT?", "@bot.", "a\n@bot b"])
def test_a_mention_is_a_word_of_its_own(text: str) -> None:
    assert mentions(text, "bot")


@pytest.mark.parametrize("text", ["bot", "@robot", "@bottom", "me@bot", "@bot-2", "@bot@x"])
def test_part_of_another_word_is_no_mention(text: str) -> None:
    assert not mentions(text, "bot")


def test_a_name_with_signs_is_no_pattern() -> None:
    assert mentions("@b.t", "b.t")
    assert not mentions("@bot", "b.t")


def test_assistants_events_redacted_messages_and_other_tenants_trigger_nothing() -> None:
    found = Assistants([assistant(trigger="always"), assistant(user="second", trigger="always")])
    assert {each.user for each in found.may_trigger("acme", message("hi"))} == {"bot", "second"}
    assert not found.may_trigger("acme", message("hi", "bot"))
    assert not found.may_trigger("acme", message("@bot hi", "second"))
    assert not found.may_trigger("acme", message('{"event":"x"}', kind="event"))
    assert not found.may_trigger("acme", message(""))
    assert not found.may_trigger("other", message("hi"))
    assert not Assistants([])


def test_reply_id_is_stable_differs_by_each_part_and_is_a_valid_id() -> None:
    ids = {
        reply_id_of(message("a"), "bot"),
        reply_id_of(message("b"), "bot"),
        reply_id_of(message("a", sequence=2), "bot"),
        reply_id_of(message("a", chat_id="chat_2"), "bot"),
        reply_id_of(message("a", message_id="msg_other"), "bot"),
        reply_id_of(message("a"), "other"),
    }
    assert len(ids) == 5, "the text is no part of it"
    assert all(len(each) <= 64 and each.isascii() for each in ids)
    draft = draft_of("acme", message("a"), "bot")
    assert draft.source_id == reply_id_of(message("a"), "bot")
    notice = msgspec.json.decode(draft.payload, type=AssistantNotice)
    assert notice.reply_id == draft.source_id


def test_jobs_of_an_assistant_in_a_chat_are_one_stream() -> None:
    drafts = [draft_of("acme", message("a", sequence=n), "bot") for n in (1, 2)]
    assert drafts[0].stream == drafts[1].stream
    assert drafts[0].destination == drafts[1].destination
    other = draft_of("acme", message("a", chat_id="chat_2"), "bot")
    assert other.stream != drafts[0].stream


@pytest.mark.parametrize("concurrency", [8, 16, 100, 4096])
def test_assistants_take_at_most_half_of_the_runners(concurrency: int) -> None:
    destinations = {
        draft_of("acme", message("a", chat_id=f"chat_{n}"), "bot").destination for n in range(200)
    }
    assert len(destinations) * per_destination_max(concurrency) <= concurrency // 2


def prompted(*messages: Message, kind: Any = "direct", **given: Any) -> list[tuple[str, str]]:
    return [(each.role, each.content) for each in prompt(assistant(**given), messages, kind)]


def test_prompt_is_the_instructions_and_the_chat() -> None:
    said = [message("hi"), message("hello", "bot", 2), message("how are you?", sequence=3)]
    assert prompted(*said, instructions="Be brief.") == [
        ("system", "Be brief."),
        ("user", "hi"),
        ("assistant", "hello"),
        ("user", "how are you?"),
    ]
    assert prompted(*said)[0] == ("user", "hi"), "without instructions"


def test_senders_are_named_in_groups_and_other_assistants_are_users() -> None:
    said = [message("hi"), message("yes", "bot", 2), message("no", "second", 3)]
    assert prompted(*said, kind="group") == [
        ("user", "ann: hi"),
        ("assistant", "yes"),
        ("user", "second: no"),
    ]


def test_events_and_redacted_messages_are_left_out() -> None:
    said = [message("{}", kind="event"), message("", sequence=2), message("hi", sequence=3)]
    assert prompted(*said) == [("user", "hi")]


def test_prompt_has_the_last_fifty_messages() -> None:
    said = [message(str(n), sequence=n) for n in range(1, 61)]
    assert [content for _, content in prompted(*said)] == [str(n) for n in range(11, 61)]


def test_prompt_has_at_most_32_kib_and_always_the_trigger() -> None:
    said = [message(str(n) * 4096, sequence=n) for n in range(1, 10)]
    contents = [content for _, content in prompted(*said)]
    assert contents == [str(n) * 4096 for n in range(2, 10)]
    assert sum(map(len, contents)) == CONTEXT_BYTES_MAX
    huge = message("x" * (CONTEXT_BYTES_MAX + 1))
    assert prompted(message("before"), huge) == [("user", huge.content)]


def test_request_is_json_of_chat_completions() -> None:
    fields = request_fields(assistant(instructions="Be."), [message('"hi"')], "direct")
    assert msgspec.json.decode(fields["messages"]) == [
        {"role": "system", "content": "Be."},
        {"role": "user", "content": '"hi"'},
    ]


def chunk(data: Any) -> ReplyDelta:
    return ReplyDelta(msgspec.json.encode(data))


def test_text_of_a_chunk_is_its_first_choices_content() -> None:
    assert (
        text_of(chunk({"choices": [{"delta": {"content": "hi"}, "finish_reason": None}]})) == "hi"
    )


@pytest.mark.parametrize(
    "data",
    [
        {"choices": []},
        {"choices": [{"delta": {"role": "assistant", "content": None}}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]},
        {"choices": [{"delta": {"content": ["parts"]}}]},
        {"usage": {}},
        [],
    ],
)
def test_any_other_chunk_has_no_text(data: Any) -> None:
    assert text_of(chunk(data)) == ""
    assert text_of(ReplyDone()) == ""
    assert text_of(ReplyDelta(b"no json")) == ""


@pytest.mark.parametrize("piece", ["a", "ä", "🙂"])
def test_content_beyond_64_kib_is_cut_between_characters_with_a_mark(piece: str) -> None:
    content = ReplyContent()
    for _ in range(CONTENT_BYTES_MAX // len(piece.encode())):
        content.add(piece)
    whole = content.message()
    assert len(whole.encode()) == CONTENT_BYTES_MAX, "just as much is whole"
    for _ in range(10_000):
        content.add(piece)
    cut = content.message()
    assert cut.endswith(CUT_MARK)
    assert CONTENT_BYTES_MAX - 4 < len(cut.encode()) <= CONTENT_BYTES_MAX
    assert whole.startswith(cut.removesuffix(CUT_MARK))


def verdict(error: ReplyError, strikes: int = 0) -> Any:
    job = Job(1, JOB_TYPE, b"", attempt=strikes + 1, strikes=strikes)
    failure = classify(failure_of(error))
    policy = with_assistants(Policies()).lookup(JOB_TYPE, failure.reason)
    assert not policy.feeds_breaker
    return decide(job, failure, policy, random.Random(1))


@pytest.mark.parametrize(
    "code", ["upstream_unavailable", "upstream_timeout", "upstream_lost", "internal", "deadline"]
)
def test_a_failure_is_tried_three_times_within_two_minutes_and_skips(code: Any) -> None:
    delays = 0.0
    for strikes in (0, 1):
        found = verdict(ReplyError(code, ""), strikes)
        assert found.action is FailureAction.RETRY
        assert found.stream is OnFailure.SKIP
        delays += found.delay_seconds
    assert delays < 20
    assert verdict(ReplyError(code, ""), 2).action is FailureAction.DEAD


def test_a_refusal_of_the_provider_is_final_at_once() -> None:
    assert verdict(ReplyError("upstream_refused", "", 400)).action is FailureAction.DEAD


def test_a_rate_is_no_strike() -> None:
    found = verdict(ReplyError("tokens_used_up", "", 429), 2)
    assert (found.action, found.strike) == (FailureAction.RETRY, False)


def test_a_planned_stop_gives_the_job_back() -> None:
    failure = failure_of(ReplyError("server_shutdown", ""))
    assert isinstance(failure, JobPostponed)
    assert verdict(ReplyError("server_shutdown", ""), 2).action is FailureAction.POSTPONE
    assert failure.reason is Reason.DEPENDENCY_FAILURE
