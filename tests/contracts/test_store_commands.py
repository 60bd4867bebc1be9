"""What every store promises about commands: chats, members, roles, records."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest
import store_rigs
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
    operator,
    send,
)

from holdfast.errors import (
    ChatHalted,
    Forbidden,
    HoldfastError,
    InvalidMessage,
    KeyReused,
    NotAMember,
    NotFound,
)
from holdfast.message import Acked, User, Watermark
from holdfast.store.commands import (
    AddMember,
    ChangeRole,
    Command,
    CreateChat,
    HaltChat,
    MembershipEvent,
    RaiseEpoch,
    RecoverChat,
    Redact,
    RemoveMember,
    RenameChat,
    Retain,
)
from holdfast.store.plan import ChatSettings

LIMITS = ChatSettings(
    members_max=4, members_at_creation_max=3, chats_per_user_max=3, name_characters_max=10
)
on_every_store = partial(store_rigs.on_every_store, limits=LIMITS)


async def roles(store: Any, chat_id: str = "chat_a") -> dict[str, str]:
    return {m.user_id: m.role for m in await store.members(chat_id)}


async def refused(store: Any, command: Command, error: type[HoldfastError], *words: str) -> None:
    """The command fails so, says these words, and leaves everything as it was."""
    before = (
        await roles(store),
        await store.heads([command.chat_id]),
        (await store.audit(None, 100)).records,
    )
    with pytest.raises(error) as caught:
        await store.change(command)
    assert type(caught.value) is error
    for word in words:
        assert word in caught.value.message
    assert (
        await roles(store),
        await store.heads([command.chat_id]),
        (await store.audit(None, 100)).records,
    ) == before


def event_of(changed: Any) -> MembershipEvent:
    assert changed.event.kind == "event" and changed.event.content_type == "application/json"
    assert changed.event.client_message_id is None
    return msgspec.json.decode(changed.event.content, type=MembershipEvent)


@pytest.mark.covers("001 creator as owner")
@on_every_store
async def test_creation_makes_the_chat_its_counter_its_owner_and_first_members_at_once(
    store: Any, rig: Rig
) -> None:
    changed = await create(store, "bob", "bob", "ann")
    assert changed.event is None and not changed.repeated
    chat = await store.chat("chat_a")
    assert chat == changed.chat
    assert (chat.tenant, chat.kind, chat.name, chat.epoch, chat.head) == (
        "default",
        "group",
        "Team",
        1,
        0,
    )
    assert (chat.first_sequence, chat.halted, chat.created_by) == (1, None, "ann")
    assert await roles(store) == {"ann": "owner", "bob": "member"}
    assert (await store.inspect("chat_a")).counter == 0


@on_every_store
async def test_a_chat_that_cannot_be_is_refused_with_the_reason(store: Any, rig: Rig) -> None:
    def new(**fields: Any) -> CreateChat:
        return CreateChat(
            **{
                "act": act(),
                "chat_id": "chat_a",
                "kind": "group",
                "name": "T",
                "members": [],
                **fields,
            }
        )

    await refused(store, new(name=""), InvalidMessage, "1 to 10")
    await refused(store, new(name="x" * 11), InvalidMessage, "1 to 10")
    await refused(store, new(name="a\nb"), InvalidMessage, "printable")
    await refused(store, new(members=["b c"]), InvalidMessage, "printable ASCII")
    await refused(store, new(chat_id="x" * 65), InvalidMessage, "64")
    await refused(
        store, new(members=["b", "c", "d"]), InvalidMessage, "at most 3 members", "afterwards"
    )
    await refused(store, new(kind="direct", name=""), InvalidMessage, "exactly two")
    await refused(
        store, new(kind="direct", name="", members=["ann"]), InvalidMessage, "exactly two"
    )
    await refused(store, new(kind="direct", members=["bob"]), InvalidMessage, "no name")
    await create(store)
    await refused(store, new(), InvalidMessage, "taken")


@pytest.mark.covers("001 creator as owner")
@on_every_store
async def test_a_direct_chat_is_unique_per_pair_and_belongs_to_both(store: Any, rig: Rig) -> None:
    made = await store.change(CreateChat(act(ANN), "chat_a", "direct", "", ["bob"]))
    again = await store.change(CreateChat(act(BOB), "chat_x", "direct", "", ["ann"]))
    assert again.chat == made.chat and again.repeated and not made.repeated
    assert await roles(store) == {"ann": "member", "bob": "member"}
    assert [s.title for s in (await store.chats_of(ANN, 10)).chats] == ["bob"]
    other = await store.change(CreateChat(act(STRANGER), "chat_o", "direct", "", ["bob"]))
    assert other.chat.chat_id == "chat_o", "pairs are a tenant's own"
    await refused(
        store, CreateChat(act(ANN), "chat_a", "direct", "", ["carl"]), InvalidMessage, "taken"
    )
    for command in (
        AddMember(act(), "chat_a", "carl"),
        RemoveMember(act(), "chat_a", "bob"),
        RemoveMember(act(), "chat_a", "ann"),
        RenameChat(act(), "chat_a", "Us"),
        ChangeRole(act(), "chat_a", "bob", "owner"),
        AddMember(operator(), "chat_a", "carl"),
    ):
        await refused(store, command, Forbidden, "direct chat")


@on_every_store
async def test_joining_leaving_renaming_and_roles_are_numbered_messages(
    store: Any, rig: Rig
) -> None:
    await create(store)
    added = await store.change(AddMember(act(), "chat_a", "bob"))
    assert event_of(added) == MembershipEvent("member_added", user_id="bob", role="member")
    assert (added.event.sequence, added.event.sender_id, added.chat.head) == (1, "ann", 1)
    assert acked(await send(store, "k", sender=BOB)).sequence == 2
    role = await store.change(ChangeRole(act(), "chat_a", "bob", "admin"))
    assert event_of(role) == MembershipEvent("role_changed", user_id="bob", role="admin")
    renamed = await store.change(RenameChat(act(BOB), "chat_a", "Crew"))
    assert event_of(renamed) == MembershipEvent("chat_renamed", name="Crew")
    left = await store.change(RemoveMember(act(BOB), "chat_a", "bob"))
    assert event_of(left) == MembershipEvent("member_removed", user_id="bob")
    page = await store.read_after("chat_a", 0, *PAGE)
    assert [(m.sequence, m.kind) for m in page.messages] == [
        (n, "text" if n == 2 else "event") for n in range(1, 6)
    ]
    assert (await store.chat("chat_a")).name == "Crew"
    assert await roles(store) == {"ann": "owner"}


@on_every_store
async def test_who_leaves_takes_no_watermark_back_when_joining_again(store: Any, rig: Rig) -> None:
    await create(store, "bob")
    acked(await send(store, "k"))
    await store.mark([Watermark(BOB, "phone", "chat_a", 1, 1, 1)])
    await store.change(RemoveMember(act(BOB), "chat_a", "bob"))
    assert await store.watermarks("chat_a") == []
    await store.change(AddMember(act(), "chat_a", "bob"))
    assert await store.watermarks("chat_a") == []


@on_every_store
async def test_a_command_that_changes_nothing_leaves_no_event(store: Any, rig: Rig) -> None:
    await create(store, "bob")
    for command in (
        AddMember(act(), "chat_a", "bob"),
        RenameChat(act(), "chat_a", "Team"),
        ChangeRole(act(), "chat_a", "bob", "member"),
    ):
        changed = await store.change(command)
        assert (changed.event, changed.chat.head) == (None, 0)
    await refused(
        store, AddMember(act(), "chat_a", "bob", "admin"), InvalidMessage, "change the role"
    )


@on_every_store
async def test_members_may_only_leave_and_redact_their_own(store: Any, rig: Rig) -> None:
    await create(store, "bob", "carl")
    acked(await send(store, "1", sender=ANN))
    acked(await send(store, "2", sender=BOB))
    for command in (
        RenameChat(act(BOB), "chat_a", "X"),
        AddMember(act(BOB), "chat_a", "dora"),
        RemoveMember(act(BOB), "chat_a", "carl"),
        ChangeRole(act(BOB), "chat_a", "bob", "owner"),
        Redact(act(BOB), "chat_a", 1),
    ):
        await refused(store, command, Forbidden, "role")
    await store.change(Redact(act(BOB), "chat_a", 2))
    await store.change(RemoveMember(act(BOB), "chat_a", "bob"))
    assert await roles(store) == {"ann": "owner", "carl": "member"}


@on_every_store
async def test_admins_rule_members_but_not_each_other(store: Any, rig: Rig) -> None:
    await create(store, "bob", "carl")
    for name in ("bob", "carl"):
        await store.change(ChangeRole(act(), "chat_a", name, "admin"))
    await store.change(AddMember(act(BOB), "chat_a", "dora"))
    for command in (
        RemoveMember(act(BOB), "chat_a", "carl"),
        RemoveMember(act(BOB), "chat_a", "ann"),
        ChangeRole(act(BOB), "chat_a", "dora", "admin"),
    ):
        await refused(store, command, Forbidden, "role")
    await store.change(RemoveMember(act(BOB), "chat_a", "dora"))
    await refused(store, AddMember(act(BOB), "chat_a", "dora", "admin"), Forbidden, "role")
    acked(await send(store, "1", sender=CARL))
    await store.change(Redact(act(BOB), "chat_a", (await store.chat("chat_a")).head))


@on_every_store
async def test_the_last_owner_stays_until_there_is_another(store: Any, rig: Rig) -> None:
    await create(store, "bob")
    for command in (
        RemoveMember(act(), "chat_a", "ann"),
        ChangeRole(act(), "chat_a", "ann", "member"),
        RemoveMember(operator(), "chat_a", "ann"),
    ):
        await refused(store, command, Forbidden, "last owner", "make another member an owner first")
    await store.change(ChangeRole(act(), "chat_a", "bob", "owner"))
    await store.change(RemoveMember(act(), "chat_a", "ann"))
    await refused(store, ChangeRole(act(BOB), "chat_a", "bob", "member"), Forbidden, "last owner")
    await store.change(RemoveMember(act(BOB), "chat_a", "bob"))
    assert await roles(store) == {}, "the last of all may go"
    await refused(store, AddMember(operator(), "chat_a", "bob"), Forbidden, "must be an owner")
    await store.change(AddMember(operator(), "chat_a", "bob", "owner"))


@on_every_store
async def test_outsiders_and_other_tenants_change_nothing(store: Any, rig: Rig) -> None:
    await create(store, "bob")
    await refused(store, RenameChat(act(EVE), "chat_a", "X"), NotAMember)
    await refused(store, RenameChat(act(STRANGER), "chat_a", "X"), NotFound)
    await refused(store, RenameChat(act(), "chat_none", "X"), NotFound)
    await refused(store, RemoveMember(act(), "chat_a", "dora"), NotFound, "not a member")
    await refused(store, ChangeRole(act(), "chat_a", "dora", "admin"), NotFound, "not a member")
    elsewhere = User("other", "op")
    await refused(store, HaltChat(act(elsewhere, operator=True), "chat_a"), NotFound)


@on_every_store
async def test_limits_are_refused_by_name(store: Any, rig: Rig) -> None:
    await create(store, "bob", "carl")
    await store.change(AddMember(act(), "chat_a", "dora"))
    await refused(store, AddMember(act(), "chat_a", "emil"), Forbidden, "at most 4 members")
    for name in "bc":
        await store.change(
            CreateChat(act(EVE, backend=True), f"chat_{name}", "group", "B", ["bob"])
        )
    await refused(
        store, CreateChat(act(EVE), "chat_d", "group", "D", ["bob"]), Forbidden, "bob is in 3 chats"
    )
    await create(store, chat_id="chat_d", creator=EVE)
    await refused(store, AddMember(act(EVE), "chat_d", "bob"), Forbidden, "bob is in 3 chats")
    await refused(
        store, AddMember(act(EVE, backend=True), "chat_d", "bob"), Forbidden, "bob is in 3 chats"
    )
    await store.change(RemoveMember(act(BOB), "chat_b", "bob"))
    await store.change(AddMember(act(EVE, backend=True), "chat_d", "bob"))


@partial(store_rigs.on_every_store, limits=ChatSettings(chats_per_user_max=6))
async def test_other_users_fill_at_most_half_of_a_users_chats(store: Any, rig: Rig) -> None:
    async def invite(chat_id: str, by: User = EVE, **how: Any) -> None:
        await store.change(CreateChat(act(by, **how), chat_id, "group", "G", ["bob"]))

    await store.change(CreateChat(act(EVE), "chat_1", "direct", "", ["bob"]))
    await invite("chat_2", CARL)
    await create(store, chat_id="chat_3", creator=EVE)
    await store.change(AddMember(act(EVE), "chat_3", "bob"))
    spam = "bob was put into 3 chats by other users"
    await refused(
        store, CreateChat(act(EVE), "chat_4", "group", "G", ["bob"]), Forbidden, spam, "tenant key"
    )
    await refused(store, CreateChat(act(CARL), "chat_4", "direct", "", ["bob"]), Forbidden, spam)
    await create(store, chat_id="chat_4", creator=EVE)
    await refused(store, AddMember(act(EVE), "chat_4", "bob"), Forbidden, spam)
    await store.change(ChangeRole(act(EVE), "chat_3", "bob", "owner"))
    await refused(store, AddMember(act(EVE), "chat_4", "bob"), Forbidden, spam)
    await invite("chat_5", backend=True)
    await store.change(AddMember(operator(), "chat_4", "bob"))
    await create(store, chat_id="chat_6", creator=BOB)
    assert len((await store.chats_of(BOB, 10)).chats) == 6, (
        "the other half is for the backend, operators and oneself"
    )
    await store.change(RemoveMember(act(BOB), "chat_2", "bob"))
    await store.change(AddMember(act(CARL, backend=True), "chat_2", "bob"))
    await store.change(RemoveMember(act(BOB), "chat_5", "bob"))
    await invite("chat_7")
    await store.change(RemoveMember(act(BOB), "chat_6", "bob"))
    await refused(store, CreateChat(act(EVE), "chat_8", "group", "G", ["bob"]), Forbidden, spam)


@on_every_store
async def test_a_repeated_command_gets_the_first_answer(store: Any, rig: Rig) -> None:
    await create(store)
    command = AddMember(act(key="k1", fingerprint="f1"), "chat_a", "bob")
    first = await store.change(command)
    await store.change(RemoveMember(act(), "chat_a", "bob"))
    again = await store.change(command)
    assert again.repeated and (again.chat, again.event) == (first.chat, first.event)
    assert await roles(store) == {"ann": "owner"}, "it was not done twice"
    with pytest.raises(KeyReused):
        await store.change(AddMember(act(key="k1", fingerprint="f2"), "chat_a", "bob"))
    await store.change(AddMember(act(key="k2", fingerprint="f1"), "chat_a", "bob"))
    with pytest.raises(NotAMember):
        await store.change(AddMember(act(EVE, key="k1", fingerprint="f1"), "chat_a", "bob"))


@on_every_store
async def test_a_refused_command_keeps_no_answer(store: Any, rig: Rig) -> None:
    await create(store, "bob")
    command = AddMember(act(BOB, key="k", fingerprint="f"), "chat_a", "dora")
    await refused(store, command, Forbidden)
    await store.change(ChangeRole(act(), "chat_a", "bob", "admin"))
    assert not (await store.change(command)).repeated


@on_every_store
async def test_redaction_takes_the_content_and_leaves_a_record(store: Any, rig: Rig) -> None:
    await create(store, "bob")
    message = acked(await send(store, "k", "secret", BOB))
    await store.change(Redact(act(reason="rude"), "chat_a", 1))
    after = (await store.read_after("chat_a", 0, *PAGE)).messages[0]
    assert (after.content, after.message_id, after.sequence) == ("", message.message_id, 1)
    record = (await store.audit(None, 10)).records[-1]
    assert (record.action, record.target, record.actor, record.reason) == (
        "message.redact",
        "chat_a/1",
        "ann",
        "rude",
    )
    assert message.message_id in record.details and "secret" not in record.details
    assert (await store.change(Redact(act(), "chat_a", 1))).event is None
    assert len((await store.audit(None, 10)).records) == 1, "what is done is not done again"
    added = await store.change(AddMember(act(), "chat_a", "carl"))
    await refused(
        store, Redact(act(), "chat_a", added.event.sequence), Forbidden, "cannot be redacted"
    )
    await refused(store, Redact(act(), "chat_a", 9), NotFound)


@pytest.mark.parametrize("rig", EMBEDDED, indirect=True)
@on_every_store
async def test_holders_of_copies_are_notified_of_a_redaction(store: Any, rig: Rig) -> None:
    await create(store, "bob")
    notified: list[int] = []
    store.on_commit(lambda entries: notified.append(len(entries)))
    acked(await send(store, "k", "secret", BOB))
    await store.change(Redact(act(reason="rude"), "chat_a", 1))
    assert notified == [1, 0]


@on_every_store
async def test_what_only_operators_do_is_refused_to_owners_and_recorded(
    store: Any, rig: Rig
) -> None:
    await create(store)
    acked(await send(store, "k"))
    for command in (
        HaltChat(act(), "chat_a"),
        RecoverChat(act(), "chat_a"),
        Retain(act(), "chat_a", 2),
    ):
        await refused(store, command, Forbidden, "operators")
    await refused(store, Retain(operator(), "chat_a", 3), InvalidMessage, "between 1 and 2")
    await store.change(HaltChat(operator(reason="r1"), "chat_a"))
    await refused(store, AddMember(act(), "chat_a", "bob"), ChatHalted)
    await store.change(RecoverChat(operator(reason="r2"), "chat_a"))
    await store.change(Retain(operator(reason="r3"), "chat_a", 2))
    await store.change(AddMember(operator(reason="r4"), "chat_a", "bob"))
    await store.record(operator(reason="r5"), "backup.take", "chats.db", "{}")
    records = [(r.number, r.action, r.reason) for r in (await store.audit(None, 10)).records]
    actions = ["chat.halt", "chat.recover", "chat.retain", "member.add", "backup.take"]
    assert records == [(n, action, f"r{n}") for n, action in enumerate(actions, 1)]
    page = await store.audit("2", 2)
    assert [r.number for r in page.records] == [3, 4], "a number works too"
    last = await store.audit(page.next, 2)
    assert [r.number for r in last.records] == [5] and last.next is None
    assert list((await store.audit("99", 2)).records) == []


@on_every_store
async def test_many_proofs_of_a_rollback_raise_the_epoch_once(store: Any, rig: Rig) -> None:
    await create(store, "bob")
    for who in (ANN, BOB):
        changed = await store.change(RaiseEpoch(act(who), "chat_a", 1))
        assert changed.chat.epoch == 2
    assert [r.action for r in (await store.audit(None, 10)).records] == ["chat.raise_epoch"]
    assert (await store.read_after("chat_a", 0, *PAGE)).epoch == 2


@on_every_store
async def test_a_damaged_chat_refuses_events_and_is_halted(store: Any, rig: Rig) -> None:
    await create(store)
    rig.lose_counter("chat_a")
    with pytest.raises(ChatHalted):
        await store.change(AddMember(act(), "chat_a", "bob"))
    assert await roles(store) == {"ann": "owner"}
    assert (await store.chat("chat_a")).halted
    await store.change(RecoverChat(operator(), "chat_a"))
    for n in range(3):
        acked(await send(store, f"k{n}"))
    rig.set_counter("chat_a", 1)
    with pytest.raises(ChatHalted):
        await store.change(AddMember(act(), "chat_a", "bob"))
    assert (await store.chat("chat_a")).halted
    assert isinstance(await send(store, "k0"), Acked)
