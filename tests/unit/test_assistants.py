"""Assistants from a message to its reply, on memory adapters and virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
from assistant_rig import BOT, assistant_rig, replies_of
from gateway_rig import settle
from reply_rig import FakeProvider

from holdfast.errors import KeyReused, RateLimited, Unavailable
from holdfast.message import Acked, Message, Outcome, User
from holdfast.streaming.assistants.content import CONTENT_BYTES_MAX, CUT_MARK
from holdfast.streaming.assistants.jobs import JOB_TYPE, AssistantNotice, draft_of
from holdfast.streaming.assistants.triggers import reply_id_of
from holdfast.streaming.providers.contract import ProviderFailed
from holdfast.streaming.reply import EntryId, ReplyBegin, ReplyError
from holdfast.streaming.reply_log.contract import LogAppend
from holdfast.streaming.reply_log.memory import MemoryReplyLog
from holdfast.telemetry.metrics import REGISTRY
from holdfast.wire.frames import SendBody
from holdfast.work.inspection import Query
from holdfast.work.job import Job
from proof.virtual_loop import LoopClock


def broken(
    code: Any = "upstream_lost", status: int = 502, *, final: bool = False
) -> ProviderFailed:
    return ProviderFailed(ReplyError(code, "it broke", status), final=final)


ACKED = Acked(Message("m", "c", 1, "text", "bot", "r", "x", "text/markdown", ""), False)
DEFERRED = Unavailable("not now", retry_after_seconds=1.0)


async def test_text_in_a_direct_chat_is_answered_by_one_message() -> None:
    async with assistant_rig() as rig:
        chat_id = await rig.chat("alice", "bot")
        said = await rig.say(chat_id, "hi")
        assert await rig.until_replied(chat_id) == ["Hello world"]
        await rig.idle()
        (message,) = await rig.texts(chat_id)
        assert message.client_message_id is not None
        assert message.client_message_id.startswith("reply_")
        assert message.content_type == "text/markdown"
        asked = rig.rig.provider.requests[0]
        assert msgspec.json.decode(asked.fields["messages"]) == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hi"},
        ]
        assert said.sequence < message.sequence
        assert len(rig.rig.provider.requests) == 1, "its own message triggers nothing"


async def test_members_see_the_text_grow_then_its_end() -> None:
    steps = ["one ", "two ", "three"]
    async with assistant_rig(provider=FakeProvider(steps=steps, token_seconds=1.0)) as rig:
        chat_id = await rig.chat("alice", "bot")
        alice = await rig.socket("alice")
        await rig.say(chat_id, "hi")
        await rig.until_replied(chat_id)
        await settle()
        frames = replies_of(alice)
        (message,) = await rig.texts(chat_id)
        assert {frame["reply_id"] for frame in frames} == {message.client_message_id}
        assert {frame["epoch"] for frame in frames} == {frames[0]["epoch"]}
        assert frames[0]["state"] == "running"
        assert (frames[0]["text"], frames[0]["sender_id"]) == ("", "bot")
        assert (frames[-1]["state"], frames[-1]["text"]) == ("done", "one two three")
        deltas = [frame["text"] for frame in frames[1:-1] if frame["text"]]
        assert deltas == steps


async def test_chat_of_more_than_a_hundred_members_gets_only_the_message() -> None:
    for others, shown in ((99, True), (100, False)):
        async with assistant_rig() as rig:
            users = [f"user{n}" for n in range(others - 1)]
            chat_id = await rig.chat("alice", "bot", *users[:80], kind="group")
            for user in users[80:]:
                await rig.add(chat_id, user)
            alice = await rig.socket("alice")
            await rig.say(chat_id, "hi @bot")
            await rig.until_replied(chat_id)
            await settle()
            assert bool(replies_of(alice)) is shown, others


async def test_two_messages_are_answered_in_their_order() -> None:
    async with assistant_rig(provider=FakeProvider(token_seconds=1.0)) as rig:
        chat_id = await rig.chat("alice", "bot")
        for text in ("one", "two"):
            await rig.say(chat_id, text)
        await rig.until_replied(chat_id, 2)
        asked = [
            msgspec.json.decode(request.fields["messages"])[-1]["content"]
            for request in rig.rig.provider.requests
        ]
        assert asked == ["one", "two"]


async def test_group_is_answered_where_the_assistant_is_named_and_is_a_member() -> None:
    async with assistant_rig() as rig:
        group = await rig.chat("alice", "bot", "carl", kind="group")
        elsewhere = await rig.chat("alice", "carl", kind="group")
        await rig.say(group, "hello")
        await rig.say(elsewhere, "hello @bot")
        await rig.say(group, "hello @bot", "carl")
        assert await rig.until_replied(group) == ["Hello world"]
        await rig.idle()
        (request,) = rig.rig.provider.requests
        contents = [each["content"] for each in msgspec.json.decode(request.fields["messages"])]
        assert contents == ["Be brief.", "alice: hello", "carl: hello @bot"]


async def test_assistant_that_joins_later_answers_and_one_that_left_does_not() -> None:
    async with assistant_rig() as rig:
        chat_id = await rig.chat("alice", "carl", kind="group")
        await rig.say(chat_id, "@bot before")
        await rig.idle()
        await rig.add(chat_id, "bot")
        await rig.say(chat_id, "@bot now")
        await rig.until_replied(chat_id)
        await rig.remove(chat_id, "bot")
        await rig.say(chat_id, "@bot after")
        await rig.idle()
        assert len(await rig.texts(chat_id)) == 1


async def test_two_assistants_do_not_talk_to_each_other() -> None:
    always = [replace(BOT, trigger="always"), replace(BOT, user="second", trigger="always")]
    async with assistant_rig(*always) as rig:
        chat_id = await rig.chat("alice", "bot", "second", kind="group")
        await rig.say(chat_id, "hi")
        await rig.until_replied(chat_id)
        await rig.until_replied(chat_id, user="second")
        await rig.idle()
        assert len(rig.rig.provider.requests) == 2


async def test_messages_before_the_first_start_and_old_ones_trigger_nothing() -> None:
    async with assistant_rig(runs=False) as rig:
        chat_id = await rig.chat("alice", "bot")
        await rig.say(chat_id, "before")
        position = await rig.reader.begin()
        assert await rig.reader.advance(position) == position
        await rig.say(chat_id, "old")
        await asyncio.sleep(2.1 * 3600)
        await rig.reader.advance(position)
        assert not await rig.jobs.find(Query())


async def test_log_read_again_makes_no_second_job() -> None:
    async with assistant_rig(runs=False) as rig:
        chat_id = await rig.chat("alice", "bot")
        position = await rig.reader.begin()
        await rig.say(chat_id, "hi")
        for _ in range(2):
            await rig.reader.advance(position)
        assert len(await rig.jobs.find(Query())) == 1


async def test_failing_provider_is_tried_three_times_then_members_learn_of_it() -> None:
    async with assistant_rig(provider=FakeProvider(steps=["half", broken()])) as rig:
        chat_id = await rig.chat("alice", "bot")
        alice = await rig.socket("alice")
        await rig.say(chat_id, "hi")
        await rig.idle()
        assert len(rig.rig.provider.requests) == 3
        (dead,) = await rig.dead()
        assert "upstream_lost" in dead.error
        assert not await rig.texts(chat_id)
        await settle()
        frames = replies_of(alice)
        assert [f["epoch"] for f in frames] == sorted(f["epoch"] for f in frames)
        assert len({frame["epoch"] for frame in frames}) == 3, "each try is an epoch"
        assert [f["state"] for f in frames if f.get("state", "running") != "running"] == ["failed"]
        assert frames[-1]["state"] == "failed"


async def test_second_try_shows_its_own_text_from_the_beginning() -> None:
    provider = FakeProvider(steps=["lost", broken()], token_seconds=1.0)
    async with assistant_rig(provider=provider) as rig:
        chat_id = await rig.chat("alice", "bot")
        alice = await rig.socket("alice")
        await rig.say(chat_id, "hi")
        await rig.until(lambda: provider.closed)
        provider.steps = ["fine"]
        assert await rig.until_replied(chat_id) == ["fine"]
        await settle()
        frames = replies_of(alice)
        assert frames[-1]["text"] == "fine"
        second = [frame for frame in frames if frame["epoch"] == frames[-1]["epoch"]]
        assert (second[0]["from"], second[0]["text"]) == (0, "")
        assert not await rig.dead()


async def test_failure_two_minutes_after_the_first_is_final() -> None:
    provider = FakeProvider(steps=["x"] * 150 + [broken()], token_seconds=1.0)
    async with assistant_rig(provider=provider) as rig:
        chat_id = await rig.chat("alice", "bot")
        await rig.say(chat_id, "hi")
        await rig.idle()
        assert len(await rig.dead()) == 1
        assert len(rig.rig.provider.opened) == 2


async def test_request_that_the_provider_refuses_is_final_at_once() -> None:
    failure = broken("upstream_refused", 400, final=True)
    async with assistant_rig(provider=FakeProvider(steps=[failure])) as rig:
        chat_id = await rig.chat("alice", "bot")
        await rig.say(chat_id, "hi")
        await rig.idle()
        assert len(rig.rig.provider.requests) == 1
        assert len(await rig.dead()) == 1


async def test_failed_reply_lets_the_next_message_be_answered() -> None:
    provider = FakeProvider(steps=["x", broken()])
    async with assistant_rig(provider=provider) as rig:
        chat_id = await rig.chat("alice", "bot")
        await rig.say(chat_id, "one")
        await rig.until(lambda: provider.closed)
        provider.steps = ["fine"]
        await rig.say(chat_id, "two")
        await rig.until_replied(chat_id)
        asked = [
            msgspec.json.decode(request.fields["messages"])[-1]["content"]
            for request in provider.requests
        ]
        assert asked[:2] == ["one", "two"], "the retry comes later"
        await rig.until_replied(chat_id, 2)


async def test_reply_is_dropped_if_sender_or_assistant_left_before_it_starts() -> None:
    for who in ("alice", "bot"):
        async with assistant_rig(runs=False) as rig:
            chat_id = await rig.chat("carl", "alice", "bot", kind="group")
            position = await rig.reader.begin()
            await rig.say(chat_id, "@bot hi")
            await rig.reader.advance(position)
            await rig.remove(chat_id, who)
            async with rig.worker.running():
                await rig.idle()
            assert not rig.rig.provider.requests
            assert not await rig.dead()


async def test_running_reply_is_cancelled_when_it_is_not_wanted_any_more() -> None:
    for what in ("sender", "assistant", "redacted"):
        provider = FakeProvider(steps=["x"] * 100, token_seconds=1.0)
        async with assistant_rig(provider=provider) as rig:
            chat_id = await rig.chat("carl", "alice", "bot", kind="group")
            carl = await rig.socket("carl")
            said = await rig.say(chat_id, "@bot hi")
            await rig.until(lambda: bool(rig.rig.provider.opened))
            if what == "redacted":
                await rig.redact(said)
            else:
                await rig.remove(chat_id, "alice" if what == "sender" else "bot")
            await rig.idle()
            assert provider.closed[0] - provider.opened[0] < 10, what
            assert not await rig.texts(chat_id)
            assert not await rig.dead()
            await settle()
            assert replies_of(carl)[-1]["state"] == "failed", what


async def test_fast_stream_does_not_delay_the_check_that_it_is_wanted() -> None:
    provider = FakeProvider(steps=["x"] * 2000, token_seconds=0.05)
    async with assistant_rig(provider=provider) as rig:
        chat_id = await rig.chat("alice", "bot")
        said = await rig.say(chat_id, "hi")
        await rig.until(lambda: bool(rig.rig.provider.opened))
        await rig.redact(said)
        await rig.idle()
        assert provider.closed[0] - provider.opened[0] < 10


async def test_trigger_redacted_at_the_last_moment_leaves_no_message() -> None:
    async with assistant_rig(provider=FakeProvider(token_seconds=1.0)) as rig:
        chat_id = await rig.chat("alice", "bot")
        said = await rig.say(chat_id, "hi")
        await rig.until(lambda: rig.rig.provider.opened)
        await rig.redact(said)
        await rig.idle()
        assert not await rig.texts(chat_id)
        assert not await rig.dead()


async def test_operator_who_cancels_ends_the_reply_quietly() -> None:
    provider = FakeProvider(steps=["x"] * 100, token_seconds=1.0)
    async with assistant_rig(provider=provider) as rig:
        chat_id = await rig.chat("alice", "bot")
        alice = await rig.socket("alice")
        await rig.say(chat_id, "hi")
        await rig.until(lambda: provider.opened)
        (running,) = rig.rig.parts.replies()
        assert await rig.rig.parts.cancel_any(running.reply_id)
        await rig.idle()
        assert not await rig.dead()
        assert len(provider.requests) == 1
        await settle()
        assert replies_of(alice)[-1]["state"] == "failed"


class Sending:
    """Sends that a test answers first."""

    def __init__(self, *answers: Outcome) -> None:
        self.answers = list(answers)
        self.bodies: list[SendBody] = []

    def submit(
        self,
        body: SendBody,
        sender: User,
        source: str,
        deadline: float,
        answer: Callable[[Outcome], None],
    ) -> None:
        self.bodies.append(body)
        answer(self.answers.pop(0))


async def test_rate_limited_send_is_repeated_without_another_generation() -> None:
    sends = Sending(
        RateLimited("slow down", retry_after_seconds=3.0), RateLimited("slow down"), ACKED
    )
    async with assistant_rig(sends=sends) as rig:
        chat_id = await rig.chat("alice", "bot")
        await rig.say(chat_id, "hi")
        await rig.idle()
        assert len({(body.client_message_id, body.content) for body in sends.bodies}) == 1
        assert len(sends.bodies) == 3
        assert len(rig.rig.provider.requests) == 1
        assert not await rig.dead()


async def test_send_limited_for_minutes_is_retried_from_the_log_without_a_strike() -> None:
    limited = [RateLimited("slow down", retry_after_seconds=30.0)] * 20
    sends = Sending(*limited, ACKED)
    async with assistant_rig(sends=sends) as rig:
        chat_id = await rig.chat("alice", "bot")
        await rig.say(chat_id, "hi")
        await rig.idle()
        assert not sends.answers
        assert len(rig.rig.provider.requests) == 1, "the log has the text"
        assert not await rig.dead()


async def test_message_sent_by_an_earlier_run_is_not_sent_again() -> None:
    sends = Sending(KeyReused("it is there"))
    async with assistant_rig(sends=sends) as rig:
        chat_id = await rig.chat("alice", "bot")
        await rig.say(chat_id, "hi")
        await rig.idle()
        assert len(sends.bodies) == 1
        assert not await rig.dead()


async def test_job_that_runs_again_finds_its_message_in_the_chat() -> None:
    async with assistant_rig(runs=False) as rig:
        chat_id = await rig.chat("alice", "bot")
        said = await rig.say(chat_id, "hi")
        payload = draft_of("default", said, "bot").payload
        notice = msgspec.json.decode(payload, type=AssistantNotice)
        for attempt in (1, 2):
            context: Any = SimpleNamespace(job=Job(1, JOB_TYPE, payload, attempt=attempt))
            await rig.replying.reply(context, notice)
        assert len(rig.rig.provider.requests) == len(await rig.texts(chat_id)) == 1


async def test_finished_reply_is_sent_from_the_log_by_the_next_run() -> None:
    log = MemoryReplyLog(LoopClock())
    async with assistant_rig(log=log, runs=False) as rig:
        chat_id = await rig.chat("alice", "bot")
        position = await rig.reader.begin()
        await rig.say(chat_id, "hi")
        await rig.reader.advance(position)
        # the job's first run made the whole reply and died before it was sent
        sent, rig.replying._sends = rig.replying._sends, Sending(*[DEFERRED] * 1000)
        async with rig.worker.running():
            await rig.until(lambda: rig.rig.provider.closed)
            await asyncio.sleep(2)
            rig.replying._sends = sent
            assert await rig.until_replied(chat_id) == ["Hello world"]
        assert len(rig.rig.provider.requests) == 1


async def test_log_of_an_earlier_run_that_was_full_is_written_again() -> None:
    log = MemoryReplyLog(LoopClock())
    async with assistant_rig(log=log, runs=False) as rig:
        chat_id = await rig.chat("alice", "bot")
        position = await rig.reader.begin()
        said = await rig.say(chat_id, "hi")
        await rig.reader.advance(position)
        begin = ReplyBegin(
            "default", "user", "bot", "assistant", "assistant", "tiny", "node-a", 0.0
        )
        reply_id = reply_id_of(said, "bot")
        epoch = await log.begin(reply_id, begin)
        await log.append([LogAppend(reply_id, EntryId(epoch, 1), [ReplyError("gap", "full")])])
        async with rig.worker.running():
            assert await rig.until_replied(chat_id) == ["Hello world"]
        assert not await rig.dead()


async def test_text_beyond_64_kib_is_stored_cut_with_a_mark() -> None:
    async with assistant_rig(provider=FakeProvider(steps=["x" * 10_000] * 8)) as rig:
        chat_id = await rig.chat("alice", "bot")
        await rig.say(chat_id, "hi")
        (text,) = await rig.until_replied(chat_id)
        assert len(text.encode()) == CONTENT_BYTES_MAX
        assert text.endswith(CUT_MARK)


async def test_nul_characters_are_stored_as_replacement_characters() -> None:
    async with assistant_rig(provider=FakeProvider(steps=["a\0b"])) as rig:
        chat_id = await rig.chat("alice", "bot")
        await rig.say(chat_id, "hi")
        before = REGISTRY.get_sample_value("holdfast_reply_characters_replaced_total") or 0
        assert await rig.until_replied(chat_id) == ["a\ufffdb"]
        after = REGISTRY.get_sample_value("holdfast_reply_characters_replaced_total")
        assert after == before + 1


async def test_reply_without_text_is_a_dead_letter() -> None:
    async with assistant_rig(provider=FakeProvider(steps=[""])) as rig:
        chat_id = await rig.chat("alice", "bot")
        await rig.say(chat_id, "hi")
        await rig.idle()
        (dead,) = await rig.dead()
        assert "no text" in dead.error


async def test_sender_pays_and_waits_without_a_bound() -> None:
    provider = FakeProvider(steps=["x"] * 10, token_seconds=10.0)
    async with assistant_rig(provider=provider) as rig:
        rig.rig.per_user = 1
        payers = []
        rig.rig.rates = lambda payer: payers.append(payer)  # type: ignore[func-returns-value]
        chats = [await rig.chat("alice", "bot", f"user{n}", kind="group") for n in range(3)]
        for chat_id in chats:
            await rig.say(chat_id, "@bot hi")
        for chat_id in chats:
            await rig.until_replied(chat_id)
        assert {(payer.tenant, payer.user, payer.is_key) for payer in payers} == {
            ("default", "alice", False)
        }
        assert provider.opened[2] - provider.opened[0] > 199, "one at a time, beyond 30 s"


async def test_sender_above_the_rate_is_answered_later() -> None:
    async with assistant_rig() as rig:
        refusals = [RateLimited("slow down", retry_after_seconds=20.0)] * 5
        rig.rig.rates = lambda payer: refusals.pop() if refusals else None
        chat_id = await rig.chat("alice", "bot")
        await rig.say(chat_id, "hi")
        assert await rig.until_replied(chat_id) == ["Hello world"]
        assert not await rig.dead()


async def test_half_of_the_runners_are_left_to_other_jobs() -> None:
    provider = FakeProvider(steps=["x", 50.0])
    async with assistant_rig(provider=provider, concurrency=16) as rig:
        rig.rig.per_user = 100
        for n in range(30):
            chat_id = await rig.chat("alice", "bot", f"user{n}", kind="group")
            await rig.say(chat_id, "@bot hi")
        await asyncio.sleep(20)
        assert 6 <= len(provider.opened) <= 8
        await rig.idle()
        assert len(provider.opened) == 30


async def test_planned_stop_gives_the_job_back() -> None:
    provider = FakeProvider(steps=["x"] * 1000, token_seconds=1.0)
    async with assistant_rig(provider=provider) as rig:
        chat_id = await rig.chat("alice", "bot")
        await rig.say(chat_id, "hi")
        await rig.until(lambda: provider.opened)
        await rig.rig.parts.drain()
        rig.worker.stop()
        await asyncio.sleep(1)
        (job,) = await rig.jobs.find(Query())
        assert job.strikes == 0
        assert not await rig.dead()
