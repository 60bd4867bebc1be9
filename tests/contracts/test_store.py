"""What every store promises about sends, numbers and pages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
from store_rigs import (
    ANN,
    BOB,
    CARL,
    EMBEDDED,
    EVE,
    PAGE,
    STRANGER,
    Rig,
    acked,
    act,
    create,
    draft,
    fill,
    on_every_store,
    operator,
    send,
)

from holdfast import telemetry
from holdfast.errors import (
    ChatHalted,
    Forbidden,
    InvalidMessage,
    KeyReused,
    NotAMember,
    NotFound,
    OutcomeUnknown,
)
from holdfast.message import (
    Acked,
    ChatCreated,
    Cursor,
    EpochRaised,
    LogEntry,
    Message,
    User,
    Watermark,
)
from holdfast.store.commands import (
    RETAIN_AT_ONCE,
    CreateChat,
    HaltChat,
    RaiseEpoch,
    RecoverChat,
    Redact,
    RemoveMember,
    RenameChat,
    Retain,
)
from holdfast.store.contract import UNREAD_LOOKED_AT, HaltedChat, HaltedChats
from holdfast.store.numbering import NO_COUNTER, TAKEN
from holdfast.store.pages import ENVELOPE_BYTES
from holdfast.store.plan import ChatSettings
from holdfast.wire.codec import encode_frame
from proof.faults import Fault, FaultPlan, faulty

Scenario = Callable[..., Awaitable[None]]


def metric(name: str) -> float:
    return telemetry.REGISTRY.get_sample_value(f"holdfast_{name}_total") or 0.0


@pytest.mark.covers("001 scenario 1, on our stores")
@on_every_store
async def test_scenario_1_basic_sequence_allocation(store: Any, rig: Rig) -> None:
    await create(store)
    await fill(store, 10)
    message = acked(await send(store, "uuid-1"))
    assert message.sequence == 11
    assert (await store.inspect("chat_a")).counter == 11
    assert (await store.read_after("chat_a", 10, *PAGE)).messages == [message]
    again = await send(store, "uuid-1")
    assert again == Acked(message, deduplicated=True), "the key leads to the message"


@pytest.mark.covers("000 2.1 ConditionalCheckFailed: cached result")
@pytest.mark.covers("001 scenario 2, on our stores")
@on_every_store
async def test_scenario_2_idempotent_retry(store: Any, rig: Rig) -> None:
    await create(store)
    await fill(store, 10)
    first = acked(await send(store, "uuid-1"))
    before = await store.inspect("chat_a")
    again = await send(store, "uuid-1")
    assert again == Acked(first, deduplicated=True)
    assert first.sequence == 11
    assert await store.inspect("chat_a") == before, "no new items, counter unchanged"


@pytest.mark.covers("001 scenario 3, on our stores")
@on_every_store
async def test_scenario_3_concurrent_writers(store: Any, rig: Rig) -> None:
    await create(store)
    await fill(store, 10)
    outcomes = await asyncio.gather(*(send(store, f"uuid-{n}") for n in (1, 2, 3)))
    assert sorted(acked(o).sequence for o in outcomes) == [11, 12, 13]
    assert (await store.inspect("chat_a")).counter == 13


@pytest.mark.covers("001 scenario 4, on our stores")
@on_every_store
async def test_scenario_4_race_condition_on_idempotency(store: Any, rig: Rig) -> None:
    """Two groups at once, each with the key: one message, no number is skipped."""
    await create(store)
    await fill(store, 10)
    groups = [draft("uuid-1"), draft("a")], [draft("b"), draft("uuid-1")]
    (first, _), (_, second) = await asyncio.gather(*(store.append(group) for group in groups))
    assert first.message == second.message
    assert (first.deduplicated, second.deduplicated) == (False, True)
    inspected = await store.inspect("chat_a")
    assert (inspected.counter, inspected.count, list(inspected.gaps)) == (13, 13, [])


@pytest.mark.covers("001 scenario 6, on our stores")
@on_every_store
async def test_scenario_6_new_chat_first_message(store: Any, rig: Rig) -> None:
    await create(store, "bob", "carl")
    assert (await store.inspect("chat_a")).counter == 0
    assert acked(await send(store, "uuid-1")).sequence == 1
    assert (await store.inspect("chat_a")).counter == 1


@pytest.mark.covers("001 scenario 7, on our stores")
@on_every_store
async def test_scenario_7_counter_missing(store: Any, rig: Rig) -> None:
    """Stronger than document 001: the chat is halted until it is recovered."""
    await create(store)
    await fill(store, 3)
    rig.lose_counter("chat_a")
    alarms = metric("durability_counter_corruption")
    assert isinstance(await send(store, "uuid-1"), ChatHalted)
    assert metric("durability_counter_corruption") == alarms + 1
    inspection = await store.inspect("chat_a")
    assert (inspection.counter, inspection.count) == (None, 3), (
        "not created here, nothing persisted"
    )
    assert inspection.chat.halted
    assert isinstance(await send(store, "uuid-2"), ChatHalted)
    await store.change(RecoverChat(operator(reason="restored wrongly"), "chat_a"))
    assert acked(await send(store, "uuid-1")).sequence == 4


@pytest.mark.covers("001 100 concurrent writers, 100 unique sequences")
@on_every_store
async def test_100_concurrent_writers_receive_100_unique_sequences(store: Any, rig: Rig) -> None:
    await create(store)
    outcomes = await asyncio.gather(*(send(store, f"uuid-{n}") for n in range(100)))
    assert sorted(acked(o).sequence for o in outcomes) == list(range(1, 101))


@on_every_store
async def test_a_group_is_numbered_in_order_across_chats(store: Any, rig: Rig) -> None:
    await create(store, chat_id="chat_a")
    await create(store, chat_id="chat_b")
    group = [draft(f"k{n}", chat_id="chat_ab"[:5] + "ab"[n % 2]) for n in range(6)]
    outcomes = await store.append(group)
    assert [(acked(o).chat_id, acked(o).sequence) for o in outcomes] == [
        (d.chat_id, n // 2 + 1) for n, d in enumerate(group)
    ]


@on_every_store
async def test_an_empty_group_is_nothing(store: Any, rig: Rig) -> None:
    assert await store.append([]) == []


@pytest.mark.covers("001 step 1: idempotency check, eventually consistent")
@on_every_store
async def test_equal_keys_in_one_group_are_merged(store: Any, rig: Rig) -> None:
    await create(store)
    first, second, other = await store.append(
        [draft("k"), draft("k"), draft("k", "something else")]
    )
    assert (first.deduplicated, second.deduplicated) == (False, True)
    assert first.message == second.message
    assert isinstance(other, KeyReused)
    assert (await store.inspect("chat_a")).count == 1


@on_every_store
async def test_the_same_key_with_other_content_is_refused(store: Any, rig: Rig) -> None:
    await create(store)
    acked(await send(store, "k", "one"))
    assert isinstance(await send(store, "k", "two"), KeyReused)


@pytest.mark.covers("001 keys not scoped to the sender")
@on_every_store
async def test_keys_are_scoped_to_sender_and_chat(store: Any, rig: Rig) -> None:
    await create(store, "bob")
    await create(store, chat_id="chat_b")
    group = [draft("k"), draft("k", "bob's", BOB), draft("k", "elsewhere", chat_id="chat_b")]
    assert [acked(o).sequence for o in await store.append(group)] == [1, 2, 1]


@on_every_store
async def test_one_bad_send_fails_alone(store: Any, rig: Rig) -> None:
    await create(store)
    group = [
        draft("1"),
        draft("2", sender=EVE),
        draft("3", chat_id="chat_none"),
        draft("4", sender=STRANGER),
        draft("5", "lone surrogate \ud800"),
        draft("six\ud800"),
        draft("7"),
    ]
    outcomes = await store.append(group)
    kinds = [type(o) for o in outcomes]
    assert kinds == [Acked, NotAMember, NotFound, NotFound, InvalidMessage, InvalidMessage, Acked]
    assert [acked(outcomes[n]).sequence for n in (0, 6)] == [1, 2]


@on_every_store
async def test_another_tenants_user_of_the_same_name_gets_no_answer_to_a_key(
    store: Any, rig: Rig
) -> None:
    await create(store)
    acked(await send(store, "k"))
    assert isinstance(await send(store, "k", sender=STRANGER), NotFound)


@pytest.mark.covers("001 step 2: membership with strong consistency")
@on_every_store
async def test_a_sender_who_has_left_gets_the_first_answer_and_nothing_new(
    store: Any, rig: Rig
) -> None:
    await create(store, "bob")
    first = acked(await send(store, "k", sender=BOB))
    await store.change(RemoveMember(act(), "chat_a", "bob"))
    assert await send(store, "k", sender=BOB) == Acked(first, deduplicated=True)
    assert isinstance(await send(store, "new", sender=BOB), NotAMember)


@pytest.mark.covers("001 no active writes during the repair")
@on_every_store
async def test_a_halted_chat_answers_known_keys_and_takes_nothing_new(store: Any, rig: Rig) -> None:
    await create(store)
    await create(store, chat_id="chat_b")
    first = acked(await send(store, "k"))
    await store.change(HaltChat(operator(reason="looks odd"), "chat_a"))
    known, new, elsewhere = await store.append(
        [draft("k"), draft("new"), draft("k", chat_id="chat_b")]
    )
    assert known == Acked(first, deduplicated=True)
    assert isinstance(new, ChatHalted) and "holdfast chat recover" in new.message
    assert "looks odd" not in repr((new.message, new.details)), (
        "an operator's words are for operators"
    )
    assert acked(elsewhere).sequence == 1


@on_every_store
async def test_damaged_counters_are_found_without_a_send_and_halt_their_chats(
    store: Any, rig: Rig
) -> None:
    for chat_id in ("chat_a", "chat_b", "chat_c"):
        await create(store, chat_id=chat_id)
        await fill(store, 3, chat_id)
    await create(store, chat_id="chat_empty")
    page = await store.damaged()
    assert list(page.chats) == [] and (await store.damaged(page.next)).next is None
    rig.lose_counter("chat_a")
    rig.set_counter("chat_b", 1)
    lost, taken = metric("durability_counter_corruption"), metric("durability_duplicate_sequence")
    assert sorted((await store.damaged()).chats) == ["chat_a", "chat_b"]
    assert (await store.halted(9)).count == 0, "it only looks"
    await store.halt_damaged(["chat_a", "chat_b", "chat_c", "chat_unknown"])
    assert metric("durability_counter_corruption") == lost + 1
    assert metric("durability_duplicate_sequence") == taken + 1
    assert [(chat.chat_id, chat.why) for chat in (await store.halted(9)).chats] == [
        ("chat_a", NO_COUNTER),
        ("chat_b", TAKEN),
    ]
    assert list((await store.damaged()).chats) == [], "what is halted is known"
    await store.halt_damaged(["chat_a"])
    assert metric("durability_counter_corruption") == lost + 1
    assert isinstance(await send(store, "1", chat_id="chat_b"), ChatHalted)
    await store.change(RecoverChat(operator(), "chat_a"))
    assert list((await store.damaged()).chats) == []
    assert acked(await send(store, "2")).sequence == 4


@pytest.mark.covers("001 step 4: message put without a condition")
@on_every_store
async def test_a_taken_sequence_halts_its_chat_alone_and_overwrites_nothing(
    store: Any, rig: Rig
) -> None:
    await create(store)
    await create(store, chat_id="chat_b")
    await fill(store, 3)
    before = (await store.read_after("chat_a", 0, *PAGE)).messages
    rig.set_counter("chat_a", 1)
    alarms = metric("durability_duplicate_sequence")
    outcomes = await store.append(
        [draft("1", chat_id="chat_b"), draft("2"), draft("3"), draft("4", chat_id="chat_b")]
    )
    assert [type(o) for o in outcomes] == [Acked, ChatHalted, ChatHalted, Acked]
    assert metric("durability_duplicate_sequence") == alarms + 1
    assert (await store.read_after("chat_a", 0, *PAGE)).messages == before
    assert isinstance(await send(store, "5"), ChatHalted)
    await store.change(RecoverChat(operator(), "chat_a"))
    assert acked(await send(store, "5")).sequence == 4


@pytest.mark.covers("001 keys kept 7 days (`IDEMPOTENCY_KEY_TTL_SECONDS`)")
@on_every_store
async def test_a_redacted_message_still_answers_its_key(store: Any, rig: Rig) -> None:
    await create(store)
    first = acked(await send(store, "k", "secret"))
    await store.change(Redact(act(), "chat_a", 1))
    again = await send(store, "k", "secret")
    assert again.deduplicated and acked(again).message_id == first.message_id
    assert acked(again).content == ""
    other = await send(store, "k", "other")
    assert other.deduplicated, "nothing is left that shows, or proves, what it said"


@on_every_store
async def test_any_text_comes_back_as_it_was_sent(store: Any, rig: Rig) -> None:
    await create(store)
    texts = [
        '"quotes" \\ \\u0041 \n\r\t',
        "ünïcödé 🎈 \U0010ffff",
        "\x7f\u2028\ufeff",
        "[1,{}]",
        "0012",
        "null",
    ]
    await store.append([draft(f"k{n}", text) for n, text in enumerate(texts)])
    assert [m.content for m in (await store.read_after("chat_a", 0, *PAGE)).messages] == texts
    if hasattr(store, "log_after"):
        assert [e.what.content for e in (await store.log_after(0, 100))[1:]] == texts


@on_every_store
async def test_text_with_a_nul_character_is_refused_and_fails_alone(store: Any, rig: Rig) -> None:
    """PostgreSQL cannot store it, so no store does."""
    await create(store)
    outcomes = await store.append([draft("1"), draft("2", "a\0b"), draft("3")])
    assert [type(o) for o in outcomes] == [Acked, InvalidMessage, Acked]
    assert "U+0000" in outcomes[1].message and outcomes[1].details == {"field": "content"}
    for refused in (
        lambda: store.change(RenameChat(act(), "chat_a", "a\0b")),
        lambda: store.change(HaltChat(operator(reason="a\0b"), "chat_a")),
        lambda: store.record(operator(), "key.issue", "key_1", "a\0b"),
        lambda: store.keep(operator(key="k", fingerprint="f"), "a\0b"),
    ):
        with pytest.raises(InvalidMessage):
            await refused()
    assert (await store.chat("chat_a")).halted is None
    assert len((await store.audit(None, 10)).records) == 0


@on_every_store
async def test_pages_are_cut_by_number_and_by_bytes_and_hold_one_message_at_least(
    store: Any, rig: Rig
) -> None:
    await create(store)
    await store.append([draft(f"k{n}", "x" * 1000) for n in range(200)])
    first = await store.read_after("chat_a", 0, 100, 1 << 20)
    assert ([m.sequence for m in first.messages], first.through) == (list(range(1, 101)), 100)
    assert (first.has_more, first.head, first.epoch) == (True, 200, 1)
    whole = await store.read_after("chat_a", 0, 500, 1 << 20)
    small = await store.read_after("chat_a", 100, 100, bytes_of(whole.messages[100:105]))
    assert (len(small.messages), small.through, small.has_more) == (5, 105, True)
    one = await store.read_after("chat_a", 105, 100, 1)
    assert (len(one.messages), one.through, one.has_more) == (1, 106, True)
    last = await store.read_after("chat_a", 198, 100, 1 << 20)
    assert ([m.sequence for m in last.messages], last.through, last.has_more) == (
        [199, 200],
        200,
        False,
    )
    none = await store.read_after("chat_a", 200, 100, 1 << 20)
    assert (list(none.messages), none.through, none.has_more) == ([], 200, False)
    long = await store.read_after("chat_a", 0, 500, bytes_of(whole.messages[:150]))
    assert (len(long.messages), long.through) == (150, 150), "cut by bytes in a later slice too"
    assert (
        len((await store.read_after("chat_a", 0, 500, bytes_of(whole.messages[:150]) - 1)).messages)
        == 149
    )


def bytes_of(messages: Sequence[Message]) -> int:
    """The bytes of a page of them on the wire, with commas and the largest frame."""
    return ENVELOPE_BYTES + sum(len(msgspec.json.encode(message)) + 1 for message in messages)


LONG_ID = '"' * 64
HARD = ["\x01" * 4096, '"' * 4096, "\\" * 4096, "ü" * 2048, "\x7f" * 4096, "\n" * 4096, "x" * 4096]


@on_every_store
async def test_a_page_s_bytes_are_those_on_the_wire_whatever_the_messages_are_made_of(
    store: Any, rig: Rig
) -> None:
    await create(store, LONG_ID, chat_id=LONG_ID)
    for kind, text in enumerate(HARD):
        sender = User("default", LONG_ID)
        group = [draft(f"{kind}{n:063}", text, sender, LONG_ID) for n in range(64)]
        assert all(map(acked, await store.append(group)))
    bytes_max, after, cut = 64 * 1024, 0, 0
    while after < 64 * len(HARD):
        page = await store.read_after(LONG_ID, after, 500, bytes_max)
        size = len(encode_frame(page, LONG_ID))
        back = await store.read_before(LONG_ID, page.messages[-1].sequence + 1, 500, bytes_max)
        assert max(size, len(encode_frame(back, LONG_ID))) <= bytes_max
        if page.has_more:
            following = (await store.read_after(LONG_ID, page.through, 1, 1)).messages[0]
            assert size + len(msgspec.json.encode(following)) > bytes_max - ENVELOPE_BYTES, (
                "and no page is cut early"
            )
            cut += 1
        after = page.through
    assert cut > 20


@on_every_store
async def test_pages_backwards_ascend_and_say_if_older_messages_exist(store: Any, rig: Rig) -> None:
    await create(store)
    await store.append([draft(f"k{n}", "x" * 1000) for n in range(150)])
    page = await store.read_before("chat_a", 151, 100, 1 << 20)
    assert ([m.sequence for m in page.messages], page.has_more) == (list(range(51, 151)), True)
    page = await store.read_before("chat_a", 51, 100, 1 << 20)
    assert ([m.sequence for m in page.messages], page.has_more) == (list(range(1, 51)), False)
    page = await store.read_before("chat_a", 51, 100, bytes_of(page.messages[-3:]))
    assert ([m.sequence for m in page.messages], page.has_more) == ([48, 49, 50], True)


@on_every_store
async def test_only_members_read_and_ex_members_lose_history(store: Any, rig: Rig) -> None:
    await create(store, "bob")
    await send(store, "k")
    assert len((await store.read_after("chat_a", 0, *PAGE, BOB)).messages) == 1
    await store.change(RemoveMember(act(), "chat_a", "bob"))
    for reader, error in ((BOB, NotAMember), (EVE, NotAMember), (STRANGER, NotFound)):
        for read in (store.read_after, store.read_before):
            with pytest.raises(error):
                await read("chat_a", 1, *PAGE, reader)
        with pytest.raises(error):
            await store.chat("chat_a", reader)
    with pytest.raises(NotFound):
        await store.read_after("chat_none", 0, *PAGE)


@on_every_store
async def test_single_memberships_are_read_with_the_head_of_their_chat(
    store: Any, rig: Rig
) -> None:
    await create(store, "bob")
    await create(store, chat_id="chat_b")
    await fill(store, 3)
    await store.change(RecoverChat(operator(), "chat_a"))
    asked = [
        (CARL, "chat_a"),
        (BOB, "chat_a"),
        (STRANGER, "chat_a"),
        (ANN, "chat_b"),
        (ANN, "chat_none"),
        (BOB, "chat_b"),
    ]
    found = {(BOB, "chat_a"): Cursor(2, 3), (ANN, "chat_b"): Cursor(1, 0)}
    assert await store.memberships_in(asked) == found
    assert await store.memberships_in([]) == {}
    await store.change(RemoveMember(act(BOB), "chat_a", "bob"))
    assert await store.memberships_in([(BOB, "chat_a")]) == {}


@on_every_store
async def test_chats_are_found_by_the_moment_of_their_newest_message(store: Any, rig: Rig) -> None:
    for name in ("a", "b", "empty"):
        await create(store, "bob", chat_id=f"chat_{name}")
    await store.change(CreateChat(act(STRANGER), "chat_o", "group", "Other", []))
    await fill(store, 2)
    await store.append([draft("k", sender=STRANGER, chat_id="chat_o")])
    moment = (await store.read_after("chat_a", 0, *PAGE)).messages[-1].created_at
    found, page = list[tuple[str, str]](), await store.active_since(moment)
    while page.next is not None:
        found += page.chats
        page = await store.active_since(moment, page.next)
    assert found == [("default", "chat_a"), ("other", "chat_o")] and list(page.chats) == []
    assert list((await store.active_since("2999-01-01T00:00:00.000Z")).chats) == []
    for token in ("x", "texts.1", "active.99", "0.chat_a"):
        with pytest.raises(InvalidMessage, match="start again"):
            await store.active_since(moment, token)


@on_every_store
async def test_heads_and_memberships_name_what_is_there(store: Any, rig: Rig) -> None:
    await create(store, "bob")
    await create(store, chat_id="chat_b")
    await fill(store, 4)
    assert await store.heads(["chat_a", "chat_b", "chat_none"]) == {
        "chat_a": Cursor(1, 4),
        "chat_b": Cursor(1, 0),
    }
    anns = {"chat_a": Cursor(1, 4), "chat_b": Cursor(1, 0)}
    assert await store.memberships([BOB, STRANGER, ANN]) == {
        BOB: {"chat_a": Cursor(1, 4)},
        STRANGER: {},
        ANN: anns,
    }
    assert await store.memberships([]) == {}
    for chats_max, answered in ((0, [ANN]), (2, [ANN]), (3, [ANN, BOB, STRANGER])):
        assert list(await store.memberships([ANN, BOB, STRANGER], chats_max)) == answered
    many = [f"chat_none_{n}" for n in range(2_500)] + ["chat_a"]
    assert await store.heads(many) == {"chat_a": Cursor(1, 4)}


@on_every_store
async def test_chats_are_listed_by_newest_activity_with_unread_and_last_message(
    store: Any, rig: Rig
) -> None:
    for name in "abc":
        await create(store, "bob", chat_id=f"chat_{name}", name=name.upper())
    await fill(store, 3, "chat_a")
    await fill(store, 1, "chat_b")
    await store.mark(
        [Watermark(BOB, "phone", "chat_a", 1, 3, 1), Watermark(BOB, "laptop", "chat_a", 1, 3, 2)]
    )
    listed = (await store.chats_of(BOB, 10)).chats
    seen = [(s.chat.chat_id, s.title, s.role, s.members, s.unread, s.read) for s in listed]
    assert seen == [
        ("chat_b", "B", "member", 2, 1, 0),
        ("chat_a", "A", "member", 2, 1, 2),
        ("chat_c", "C", "member", 2, 0, 0),
    ]
    assert [s.last_message and s.last_message.sequence for s in listed] == [1, 3, None]
    first = await store.chats_of(BOB, 1)
    second = await store.chats_of(BOB, 1, first.next)
    third = await store.chats_of(BOB, 1, second.next)
    pages = [[s.chat.chat_id for s in page.chats] for page in (first, second, third)]
    assert pages == [["chat_b"], ["chat_a"], ["chat_c"]] and third.next is None
    await send(store, "again", chat_id="chat_b")
    (entry,) = (await store.chats_of(BOB, 1, first.next)).chats
    assert entry.chat.chat_id == "chat_a", "where the page ended, not where its last chat is by now"
    await create(store, "bob", chat_id="chat_d")
    assert (await store.chats_of(BOB, 1)).chats[0].chat.chat_id == "chat_d", "a new chat is on top"
    some = await store.chats_of(BOB, 1, None, {"chat_a", "chat_b", "chat_of_nobody"})
    more = await store.chats_of(BOB, 9, some.next, {"chat_a", "chat_b"})
    assert {entry.chat.chat_id for entry in (*some.chats, *more.chats)} == {"chat_a", "chat_b"}
    assert (len(more.chats), more.next) == (1, None)
    nothing = await store.chats_of(BOB, 9, None, set())
    assert (list(nothing.chats), nothing.next) == ([], None)


@on_every_store
async def test_token_of_no_page_of_this_list_is_refused(store: Any, rig: Rig) -> None:
    await create(store, "bob")
    await create(store, chat_id="chat_b")
    await store.change(CreateChat(act(User("other", "bob")), "chat_o", "group", "Other", []))
    await store.record(operator(reason="r"), "key.issue", "key_1")
    for token in ("", "chat_a", "x.chat_a", "-1.chat_a", "0.chat_none", "0.chat_o", "audit.1"):
        with pytest.raises(InvalidMessage, match="start again"):
            await store.chats_of(BOB, 1, token)
    with pytest.raises(Forbidden, match="list from the beginning"):
        await store.chats_of(BOB, 1, "0.chat_a", {"chat_b"})
    with pytest.raises(NotAMember, match="list from the beginning"):
        await store.chats_of(BOB, 1, "0.chat_b")
    for token in ("", "x", "-1", "1.5", "texts.1", "audit.2", str(2**53)):
        with pytest.raises(InvalidMessage, match="start again"):
            await store.audit(token, 10)
    for token in ("", "x", "audit.0", "texts.4", "0.chat_a"):
        with pytest.raises(InvalidMessage, match="start again"):
            await store.texts_of(BOB, token)


async def unread(store: Any, user: User) -> tuple[int, bool]:
    (summary,) = (await store.chats_of(user, 10)).chats
    return summary.unread, summary.unread_capped


@on_every_store
async def test_unread_is_what_others_wrote_and_can_still_be_read(store: Any, rig: Rig) -> None:
    await create(store, "bob")
    await fill(store, 3)
    assert (await unread(store, ANN), await unread(store, BOB)) == ((0, False), (3, False)), (
        "ann wrote them"
    )
    await store.change(RenameChat(act(), "chat_a", "renamed"))
    assert await unread(store, BOB) == (3, False), "a new name is nothing to read"
    await store.change(Redact(act(), "chat_a", 2))
    assert await unread(store, BOB) == (2, False), "nor is what was taken back"
    await store.mark([Watermark(BOB, "phone", "chat_a", 1, 4, 1)])
    assert await unread(store, BOB) == (1, False)


@on_every_store
async def test_unread_is_exact_or_says_that_there_may_be_more(store: Any, rig: Rig) -> None:
    """Only the newest ``UNREAD_LOOKED_AT`` messages of a chat are counted."""
    await create(store, "bob")
    await send(store, "bobs own", sender=BOB)
    await fill(store, UNREAD_LOOKED_AT - 1)
    assert await unread(store, BOB) == (UNREAD_LOOKED_AT - 1, False)
    await send(store, "one more")
    assert await unread(store, BOB) == (UNREAD_LOOKED_AT, True), "the oldest is out of sight"
    for n in range(10):
        await send(store, f"bobs {n}", sender=BOB)
    assert await unread(store, BOB) == (UNREAD_LOOKED_AT - 10, True), (
        "at least that many: bob's own do not count"
    )
    await store.mark([Watermark(BOB, "phone", "chat_a", 1, 11, 11)])
    assert await unread(store, BOB) == (UNREAD_LOOKED_AT - 10, False)


@on_every_store
async def test_what_retention_took_is_not_unread(store: Any, rig: Rig) -> None:
    await create(store, "bob")
    await fill(store, UNREAD_LOOKED_AT + 3)
    await store.change(Retain(operator(), "chat_a", 4))
    assert await unread(store, BOB) == (UNREAD_LOOKED_AT, False)
    await store.change(Retain(operator(), "chat_a", UNREAD_LOOKED_AT + 3))
    assert await unread(store, BOB) == (1, False)


@on_every_store
async def test_watermarks_merge_to_their_maxima_and_what_is_no_members_is_ignored(
    store: Any, rig: Rig
) -> None:
    await create(store, "bob")
    await fill(store, 9)
    marks = [
        Watermark(BOB, "phone", "chat_a", 1, 5, 2),
        Watermark(BOB, "phone", "chat_a", 1, 3, 4),
        Watermark(BOB, "laptop", "chat_a", 1, 1, 0),
        Watermark(EVE, "phone", "chat_a", 1, 1, 1),
        Watermark(STRANGER, "phone", "chat_a", 1, 1, 1),
        Watermark(BOB, "phone", "chat_none", 1, 1, 1),
        Watermark(BOB, "phone", "chat_a", 0, 9, 9),
        Watermark(BOB, "phone", "chat_a", 7, 9, 9),
    ]
    await store.mark(marks)
    await store.mark([Watermark(BOB, "phone", "chat_a", 1, 4, 1)])
    expected = [
        Watermark(BOB, "laptop", "chat_a", 1, 1, 0),
        Watermark(BOB, "phone", "chat_a", 1, 5, 4),
    ]
    assert await store.watermarks("chat_a") == expected


@on_every_store
async def test_a_new_epoch_takes_the_watermarks_along_as_far_as_the_chat_goes(
    store: Any, rig: Rig
) -> None:
    """Its numbers mean the same messages as before: whoever had read them has, and
    nobody can make them unread.
    """
    await create(store, "bob")
    await fill(store, 9)
    await store.mark(
        [Watermark(BOB, "phone", "chat_a", 1, 12, 4), Watermark(ANN, "phone", "chat_a", 1, 9, 11)]
    )
    for epoch, command in enumerate(
        (RaiseEpoch(act(), "chat_a", 1), RecoverChat(operator(), "chat_a")), 2
    ):
        await store.change(command)
        await store.change(RaiseEpoch(act(), "chat_a", 1))
        marks = [
            Watermark(ANN, "phone", "chat_a", epoch, 9, 9),
            Watermark(BOB, "phone", "chat_a", epoch, 9, 4),
        ]
        assert await store.watermarks("chat_a") == marks
        (summary,) = (await store.chats_of(BOB, 10)).chats
        assert (summary.read, summary.unread) == (4, 5)
    await store.mark(
        [Watermark(BOB, "phone", "chat_a", 2, 9, 9), Watermark(BOB, "phone", "chat_a", 3, 1, 5)]
    )
    assert (await store.watermarks("chat_a"))[1] == Watermark(BOB, "phone", "chat_a", 3, 9, 5)


async def test_watermarks_of_devices_beyond_the_limit_merge_into_the_unnamed_device(
    rig: Rig,
) -> None:
    rig.limits = ChatSettings(devices_per_member_max=2)

    async with rig.open() as store:
        await create(store, "bob")
        await fill(store, 9)
        await store.mark(
            [
                Watermark(BOB, "read-on", "chat_a", 1, 1, 5),
                Watermark(ANN, "other", "chat_a", 1, 1, 1),
            ]
        )
        await store.mark([Watermark(BOB, f"phone-{n}", "chat_a", 1, n, 0) for n in range(2, 8)])
        kept = [
            Watermark(BOB, "", "chat_a", 1, 5, 5),
            *(Watermark(BOB, f"phone-{n}", "chat_a", 1, n, 0) for n in (6, 7)),
        ]
        assert await store.watermarks("chat_a") == [
            Watermark(ANN, "other", "chat_a", 1, 1, 1),
            *kept,
        ]
        await store.change(RecoverChat(operator(), "chat_a"))
        await store.mark(
            [
                Watermark(BOB, "phone-8", "chat_a", 2, 1, 6),
                Watermark(BOB, "phone-9", "chat_a", 2, 8, 1),
            ]
        )
        assert [w for w in await store.watermarks("chat_a") if w.user == BOB] == [
            Watermark(BOB, "", "chat_a", 2, 6, 6),
            Watermark(BOB, "phone-7", "chat_a", 2, 7, 0),
            Watermark(BOB, "phone-9", "chat_a", 2, 8, 1),
        ], "in a new epoch, too"


@pytest.mark.parametrize("rig", EMBEDDED, indirect=True)
@on_every_store
async def test_listeners_hear_every_commit_in_order_before_the_answer(store: Any, rig: Rig) -> None:
    heard: list[LogEntry] = []
    store.on_commit(heard.extend)
    await create(store, "bob")
    assert [e.what for e in heard] == [ChatCreated(("ann", "bob"))]
    first = acked(await send(store, "1"))
    assert (first.sequence, heard[-1].what) == (1, first)
    await send(store, "1")
    assert len(heard) == 2, "a retry adds nothing"
    changed = await store.change(RemoveMember(act(BOB), "chat_a", "bob"))
    assert heard[-1].what == changed.event
    await store.change(RecoverChat(operator(), "chat_a"))
    assert (heard[-1].what, heard[-1].epoch) == (EpochRaised(2), 2)
    await store.change(RaiseEpoch(operator(), "chat_a", 2))
    await store.change(RaiseEpoch(operator(), "chat_a", 2))
    assert (heard[-1].what, heard[-1].epoch, len(heard)) == (EpochRaised(2), 3, 5)
    assert {(e.tenant, e.chat_id) for e in heard} == {("default", "chat_a")}
    assert [e.offset for e in heard] == sorted({e.offset for e in heard})


@on_every_store
async def test_retention_moves_the_first_sequence_and_keeps_the_numbering(
    store: Any, rig: Rig
) -> None:
    await create(store)
    await fill(store, 5)
    changed = await store.change(Retain(operator(reason="30 days"), "chat_a", 4))
    assert changed.chat.first_sequence == 4
    page = await store.read_after("chat_a", 0, *PAGE)
    assert ([m.sequence for m in page.messages], page.through) == ([4, 5], 5)
    inspection = await store.inspect("chat_a")
    assert (inspection.counter, inspection.highest, inspection.count, list(inspection.gaps)) == (
        5,
        5,
        2,
        [],
    )
    await store.change(Retain(operator(), "chat_a", 6))
    assert acked(await send(store, "new")).sequence == 6, "a number is never given twice"


@on_every_store
async def test_retention_goes_in_bounded_steps(store: Any, rig: Rig) -> None:
    await create(store)
    for start in range(0, RETAIN_AT_ONCE + 10, 1_000):
        await store.append([draft(f"k{start + n}") for n in range(1_000)])
    steps = [
        (await store.change(Retain(operator(), "chat_a", RETAIN_AT_ONCE + 5))).chat.first_sequence
        for _ in "abc"
    ]
    assert steps == [RETAIN_AT_ONCE + 1, RETAIN_AT_ONCE + 5, RETAIN_AT_ONCE + 5]
    assert (await store.read_after("chat_a", 0, *PAGE)).messages[0].sequence == RETAIN_AT_ONCE + 5


@on_every_store
async def test_holes_are_found_wherever_they_are(store: Any, rig: Rig) -> None:
    await create(store)
    await fill(store, 40)
    await store.change(Retain(operator(), "chat_a", 4))
    for lost in (4, 5, 9, 17, 18, 19, 20, 21, 33, 39, 40):
        rig.lose_message("chat_a", lost)
    inspection = await store.inspect("chat_a")
    assert [tuple(gap) for gap in inspection.gaps] == [(4, 5), (9, 9), (17, 21), (33, 33), (39, 40)]
    assert (inspection.counter, inspection.highest, inspection.count) == (40, 38, 26)


@pytest.mark.covers("001 audit trail: `recovered_at`, `recovered_from_sequence`")
@on_every_store
async def test_recovery_restores_a_lost_counter_records_holes_and_raises_the_epoch(
    store: Any, rig: Rig
) -> None:
    await create(store)
    await fill(store, 6)
    rig.lose_message("chat_a", 3)
    rig.lose_counter("chat_a")
    assert isinstance(await send(store, "k"), ChatHalted)
    changed = await store.change(RecoverChat(operator(reason="why"), "chat_a"))
    assert (changed.chat.epoch, changed.chat.head, changed.chat.halted) == (2, 6, None)
    inspection = await store.inspect("chat_a")
    assert (
        [tuple(g) for g in inspection.gaps]
        == [tuple(g) for g in inspection.recorded_gaps]
        == [(3, 3)]
    )
    page = await store.read_after("chat_a", 0, *PAGE)
    assert ([m.sequence for m in page.messages], page.epoch, page.through) == (
        [1, 2, 4, 5, 6],
        2,
        6,
    )
    record = (await store.audit(None, 10)).records[-1]
    assert (record.action, record.target, record.actor, record.reason) == (
        "chat.recover",
        "chat_a",
        "op",
        "why",
    )
    assert '"counter":[null,6]' in record.details and "[3,3]" in record.details
    assert acked(await send(store, "k")).sequence == 7


@pytest.mark.covers("000 contract 1, connection lost before the response: retry")
@on_every_store
async def test_a_reply_lost_after_the_commit_is_found_again_by_the_retry(
    store: Any, rig: Rig
) -> None:
    lossy = faulty(store, FaultPlan(random.Random(1), script={"append": [Fault.LOST_REPLY]}))
    await create(store)
    with pytest.raises(OutcomeUnknown):
        await lossy.append([draft("k")])
    again = (await lossy.append([draft("k")]))[0]
    assert again.deduplicated and acked(again).sequence == 1
    assert (await store.inspect("chat_a")).count == 1


@on_every_store
async def test_halted_chats_of_all_tenants_are_counted_and_the_first_are_listed(
    store: Any, rig: Rig
) -> None:
    assert await store.halted(10) == HaltedChats(0, [])
    for name in ("c", "a", "b", "whole"):
        await create(store, "bob", chat_id=f"chat_{name}")
    await store.change(CreateChat(act(STRANGER), "chat_o", "group", "Other", []))
    for name in ("c", "a", "b"):
        await store.change(HaltChat(operator(reason=f"why {name}"), f"chat_{name}"))
    theirs = act(User("other", "op"), operator=True, reason="theirs")
    await store.change(HaltChat(theirs, "chat_o"))
    first = [HaltedChat(f"chat_{name}", "default", f"why {name}") for name in ("a", "b", "c")]
    assert await store.halted(3) == HaltedChats(4, first)
    assert await store.halted(0) == HaltedChats(4, [])
    assert (await store.halted(10)).chats[3] == HaltedChat("chat_o", "other", "theirs")
    await store.change(RecoverChat(operator(reason="mended"), "chat_a"))
    assert [chat.chat_id for chat in (await store.halted(2)).chats] == ["chat_b", "chat_c"]
