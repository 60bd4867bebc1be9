"""What every store promises about bans and mutes in a chat."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest
import store_rigs
from store_rigs import ANN, BOB, CARL, EVE, PAGE, Rig, acked, act, create, operator, send

from holdfast.drivers.statements import migrations
from holdfast.errors import ChatHalted, Forbidden, HoldfastError, NotAMember, NotFound
from holdfast.message import Ban, Mute, User, check_id
from holdfast.store.commands import (
    OPERATOR,
    AddMember,
    ChangeBan,
    ChangeMute,
    ChangeRole,
    Command,
    CommandContext,
    CreateChat,
    HaltChat,
    MembershipEvent,
    RemoveMember,
    RenameChat,
)
from holdfast.store.plan import ChatSettings
from holdfast.store.sqlite import SqliteStore

on_every_store = partial(store_rigs.on_every_store, limits=ChatSettings(bans_max=2, mutes_max=2))
DORA = User("default", "dora")


def ban(user_id: str, by: User = ANN, *, banned: bool = True, chat_id: str = "chat_a") -> ChangeBan:
    return ChangeBan(act(by), chat_id, user_id, banned)


def mute(
    user_id: str, by: User = ANN, *, muted: bool = True, chat_id: str = "chat_a"
) -> ChangeMute:
    return ChangeMute(act(by), chat_id, user_id, muted)


async def members(store: Any, chat_id: str = "chat_a") -> dict[str, tuple[str, bool]]:
    return {m.user_id: (m.role, m.muted) for m in await store.members(chat_id)}


async def banned(store: Any, chat_id: str = "chat_a") -> list[str]:
    return [one.user_id for one in await store.bans(chat_id)]


async def refused(store: Any, command: Command, error: type[HoldfastError], *words: str) -> None:
    """The command fails so, says these words, and leaves everything as it was."""

    async def everything() -> Any:
        chat_id = command.chat_id
        return (
            await members(store, chat_id),
            await banned(store, chat_id),
            await store.heads([chat_id]),
        )

    before = await everything()
    with pytest.raises(error) as caught:
        await store.change(command)
    assert type(caught.value) is error
    for word in words:
        assert word in caught.value.message
    assert await everything() == before


def event_of(changed: Any) -> MembershipEvent:
    return msgspec.json.decode(changed.event.content, type=MembershipEvent)


async def staffed(store: Any) -> None:
    """A group with an owner (ann), an admin (bob) and two members (carl, dora)."""
    await create(store, "bob", "carl", "dora")
    await store.change(ChangeRole(act(), "chat_a", "bob", "admin"))


@on_every_store
async def test_banned_member_is_removed_and_cannot_be_added_until_unbanned(
    store: Any, rig: Rig
) -> None:
    await staffed(store)
    changed = await store.change(ban("carl", BOB))
    assert event_of(changed) == MembershipEvent("member_removed", user_id="carl", banned=True)
    assert changed.chat.head == changed.event.sequence == 2
    assert "carl" not in await members(store)
    assert await store.bans("chat_a") == [Ban("carl", "bob", store_rigs.AT)]
    assert isinstance(await send(store, "k", sender=CARL), NotAMember)
    with pytest.raises(NotAMember):
        await store.read_after("chat_a", 0, *PAGE, CARL)
    for adding in (
        AddMember(act(), "chat_a", "carl"),
        AddMember(operator(), "chat_a", "carl", "owner"),
    ):
        await refused(store, adding, Forbidden, "carl is banned", "lift the ban")
    lifted = await store.change(ban("carl", BOB, banned=False))
    assert event_of(lifted) == MembershipEvent("user_unbanned", user_id="carl")
    assert await banned(store) == [] and "carl" not in await members(store), (
        "lifting a ban adds nobody"
    )
    await store.change(AddMember(act(), "chat_a", "carl"))
    acked(await send(store, "k", sender=CARL))


@on_every_store
async def test_user_who_is_not_a_member_can_be_banned_in_advance(store: Any, rig: Rig) -> None:
    await staffed(store)
    changed = await store.change(ban("eve"))
    assert event_of(changed) == MembershipEvent("user_banned", user_id="eve"), "nobody was removed"
    again = await store.change(ban("eve"))
    assert (again.event, again.chat.head) == (
        None,
        changed.chat.head,
    ), "what is done is not done again"
    await refused(store, AddMember(act(), "chat_a", "eve"), Forbidden, "eve is banned")
    await refused(
        store, ban("carl", banned=False), NotFound, "carl is not banned", "nothing was changed"
    )
    await store.change(ban("fred"))
    await refused(store, ban("gina"), Forbidden, "at most 2 bans")
    await refused(store, ChangeBan(act(), "chat_none", "eve", True), NotFound)
    await create(store, "eve", chat_id="chat_b"), "a ban is one chat's"


@on_every_store
async def test_muted_member_reads_and_cannot_send(store: Any, rig: Rig) -> None:
    await staffed(store)
    first = acked(await send(store, "k", "before", CARL))
    changed = await store.change(mute("carl", BOB))
    assert event_of(changed) == MembershipEvent("member_muted", user_id="carl")
    assert (await members(store))["carl"] == ("member", True)
    answer = await send(store, "k2", sender=CARL)
    assert isinstance(answer, Forbidden) and "muted" in answer.message and answer.details["muted"]
    assert acked(await send(store, "k", "before", CARL)) == first, (
        "what was stored is still answered so"
    )
    page = await store.read_after("chat_a", 0, *PAGE, CARL)
    assert page.messages[-1].sequence == changed.event.sequence, (
        "nothing was stored, and it may read"
    )
    assert (await store.change(mute("carl"))).event is None
    lifted = await store.change(mute("carl", muted=False))
    assert event_of(lifted) == MembershipEvent("member_unmuted", user_id="carl")
    acked(await send(store, "k2", sender=CARL))
    await refused(
        store, mute("carl", muted=False), NotFound, "carl is not muted", "nothing was changed"
    )
    await refused(store, mute("eve"), NotFound, "not a member")


@on_every_store
async def test_sender_who_is_muted_in_the_tenant_is_refused_in_the_commit(
    store: Any, rig: Rig
) -> None:
    await create(store, "bob")
    drafts = [
        store_rigs.draft("1"),
        msgspec.structs.replace(store_rigs.draft("2", sender=BOB), muted=True),
        store_rigs.draft("3"),
    ]
    one, two, three = await store.append(drafts)
    assert (acked(one).sequence, acked(three).sequence) == (1, 2)
    assert (
        isinstance(two, Forbidden)
        and two.details["muted"]
        and "muted in the tenant default" in two.message
    )


async def puts_nothing_before_others(store: Any, by: CommandContext, where: str) -> None:
    """Bob, an admin, is muted; an id is read by everybody, too."""
    for command in (
        RenameChat(by, "chat_a", "heard all the same"),
        AddMember(by, "chat_a", "heard-all-the-same"),
        ChangeBan(by, "chat_a", "heard-all-the-same", True),
    ):
        await refused(store, command, Forbidden, f"muted in {where}")
    for command in (
        ChangeMute(by, "chat_a", "carl", True),
        ChangeBan(by, "chat_a", "dora", True),
        ChangeBan(by, "chat_a", "dora", False),
        RemoveMember(by, "chat_a", "carl"),
        RemoveMember(by, "chat_a", "bob"),
    ):
        await store.change(command)


@on_every_store
async def test_who_is_muted_in_a_chat_puts_nothing_before_others(store: Any, rig: Rig) -> None:
    await staffed(store)
    await store.change(mute("bob"))
    await puts_nothing_before_others(store, act(BOB), "chat_a")


@on_every_store
async def test_who_is_muted_in_the_tenant_puts_nothing_before_others(store: Any, rig: Rig) -> None:
    await staffed(store)
    await puts_nothing_before_others(
        store, msgspec.structs.replace(act(BOB), muted=True), "the tenant default"
    )


@on_every_store
async def test_user_muted_in_the_tenant_creates_no_chat_but_finds_a_direct_one(
    store: Any, rig: Rig
) -> None:
    by = msgspec.structs.replace(act(BOB), muted=True)
    for kind, name in (("group", "heard all the same"), ("direct", "")):
        with pytest.raises(Forbidden, match="muted in the tenant default") as caught:
            await store.change(CreateChat(by, "chat_a", kind, name, ["ann"]))
        assert caught.value.details == {"muted": True} and not await store.heads(["chat_a"])
    await store.change(CreateChat(act(ANN), "chat_a", "direct", "", ["bob"]))
    found = await store.change(CreateChat(by, "chat_b", "direct", "", ["ann"]))
    assert found.chat.chat_id == "chat_a"
    await store.change(ChangeMute(by, "chat_a", "ann", True)), "to decline a chat says nothing"


@on_every_store
async def test_who_may_ban_and_mute_whom(store: Any, rig: Rig) -> None:
    await staffed(store)
    for kind in (ban, mute):
        await refused(store, kind("dora", CARL), Forbidden, "role")
        await refused(store, kind("ann", CARL), Forbidden, "role")
        await refused(store, kind("bob", BOB), Forbidden, "yourself")
        await refused(store, kind("ann", BOB), Forbidden, "role")
        await refused(store, kind("dora", EVE), NotAMember)
        await refused(store, kind("dora", User("other", "ann")), NotFound)
    await store.change(ChangeRole(act(), "chat_a", "carl", "owner"))
    for kind, by in ((ban, act()), (ban, operator()), (mute, act()), (mute, operator())):
        name = ChangeBan if kind is ban else ChangeMute
        await refused(
            store,
            name(by, "chat_a", "carl", True),
            Forbidden,
            "carl is an owner",
            "change the role first",
        )
    await store.change(ChangeRole(act(), "chat_a", "dora", "admin"))
    await refused(store, mute("dora", BOB), Forbidden, "role")
    await store.change(mute("dora", CARL))
    await refused(store, mute("dora", DORA, muted=False), Forbidden, "yourself")
    await refused(store, RenameChat(act(DORA), "chat_a", "heard all the same"), Forbidden, "muted")
    await store.change(ban("dora", CARL))
    await refused(store, ban("dora", EVE, banned=False), NotAMember)


@on_every_store
async def test_member_of_a_direct_chat_declines_it_by_muting_the_other(
    store: Any, rig: Rig
) -> None:
    await store.change(CreateChat(act(ANN), "chat_a", "direct", "", ["bob"]))
    await store.change(mute("ann", BOB))
    assert isinstance(await send(store, "1", sender=ANN), Forbidden)
    acked(await send(store, "2", sender=BOB))
    await refused(store, mute("ann", ANN, muted=False), Forbidden, "yourself")
    await refused(store, ban("ann", BOB), Forbidden, "direct chat", "mute the other")
    await refused(store, ChangeBan(operator(), "chat_a", "ann", True), Forbidden, "direct chat")
    await store.change(mute("ann", BOB, muted=False))
    acked(await send(store, "1", sender=ANN))


@on_every_store
async def test_mute_outlives_the_membership_until_it_is_lifted(store: Any, rig: Rig) -> None:
    await staffed(store)
    await store.change(mute("carl", BOB))
    await store.change(ChangeMute(operator(), "chat_a", "dora", True))
    for user in (CARL, DORA):
        name = user.user_id
        for leaving in (RemoveMember(act(user), "chat_a", name), ban(name)):
            await store.change(leaving)
            if isinstance(leaving, ChangeBan):
                await store.change(ban(name, banned=False))
            added = await store.change(AddMember(act(), "chat_a", name))
            assert event_of(added) == MembershipEvent(
                "member_added", user_id=name, role="member", muted=True
            )
            assert (await members(store))[name] == ("member", True)
            refusal = await send(store, "1", sender=user)
            assert isinstance(refusal, Forbidden) and refusal.details["muted"]
        await store.change(RemoveMember(act(user), "chat_a", name))
    assert await store.mutes("chat_a") == [Mute("carl"), Mute("dora", by_operator=True)]
    await refused(store, mute("dora", muted=False), Forbidden, "only an operator lifts")
    await refused(
        store, AddMember(act(), "chat_a", "dora", "owner"), Forbidden, "only an operator lifts"
    )
    lifted = await store.change(ChangeMute(operator(), "chat_a", "dora", False))
    assert event_of(lifted) == MembershipEvent("member_unmuted", user_id="dora")
    assert "dora" not in await members(store), "lifting a mute adds nobody"
    await store.change(mute("carl", BOB, muted=False))
    await refused(store, mute("carl", muted=False), NotFound, "not a member")
    for user in (CARL, DORA):
        added = await store.change(AddMember(act(), "chat_a", user.user_id))
        assert not event_of(added).muted
        acked(await send(store, "1", sender=user))
    assert await store.mutes("chat_a") == []


@on_every_store
async def test_role_of_an_owner_lifts_the_chats_own_mute(store: Any, rig: Rig) -> None:
    await staffed(store)
    for name in ("carl", "dora"):
        await store.change(mute(name))
    await store.change(ChangeRole(act(), "chat_a", "carl", "admin"))
    assert (await members(store))["carl"] == ("admin", True), "a role below owner changes nothing"
    await store.change(ChangeRole(act(), "chat_a", "carl", "owner"))
    assert (await members(store))["carl"] == ("owner", False)
    await store.change(RemoveMember(act(), "chat_a", "dora"))
    added = await store.change(AddMember(act(), "chat_a", "dora", "owner"))
    assert not event_of(added).muted and await store.mutes("chat_a") == []
    acked(await send(store, "1", sender=DORA))


@on_every_store
async def test_mutes_of_a_chat_are_bounded_with_those_who_left(store: Any, rig: Rig) -> None:
    await staffed(store)
    for name in ("carl", "dora"):
        await store.change(mute(name))
        await store.change(RemoveMember(act(), "chat_a", name))
    await refused(store, mute("bob"), Forbidden, "at most 2 mutes")
    (
        await store.change(ChangeMute(operator(), "chat_a", "carl", True)),
        "taking over makes no more of them",
    )
    await store.change(mute("dora", muted=False))
    await store.change(mute("bob"))


@on_every_store
async def test_owner_who_fills_the_bans_and_mutes_keeps_no_operator_from_more(
    store: Any, rig: Rig
) -> None:
    await create(store, *(f"u{n}" for n in range(6)))
    for command, what in ((ChangeMute, "mutes"), (ChangeBan, "bans")):
        for n in range(2):
            await store.change(command(act(), "chat_a", f"u{n}", True))
        await refused(store, command(act(), "chat_a", "u2", True), Forbidden, f"at most 2 {what}")
        for n in range(2, 4):
            await store.change(command(operator(), "chat_a", f"u{n}", True))
        await refused(
            store, command(operator(), "chat_a", "u4", True), Forbidden, f"at most 4 {what}"
        )


@on_every_store
async def test_operators_acts_are_recorded_and_a_halted_chat_takes_none(
    store: Any, rig: Rig
) -> None:
    await staffed(store)
    for command in (
        ChangeBan(operator(reason="r1"), "chat_a", "carl", True),
        ChangeBan(operator(reason="r2"), "chat_a", "carl", False),
        ChangeMute(operator(reason="r3"), "chat_a", "dora", True),
        ChangeMute(operator(reason="r4"), "chat_a", "dora", False),
    ):
        await store.change(command)
    actions = ["member.ban", "member.unban", "member.mute", "member.unmute"]
    records = [(r.action, r.target, r.reason) for r in (await store.audit(None, 10)).records]
    assert records == [(action, "chat_a", f"r{n}") for n, action in enumerate(actions, 1)]
    await store.change(ban("carl"))
    assert len((await store.audit(None, 10)).records) == 4, "members' acts are in the chat itself"
    await store.change(HaltChat(operator(), "chat_a"))
    await refused(store, ban("dora"), ChatHalted)
    await refused(store, mute("dora"), ChatHalted)


@on_every_store
async def test_members_see_an_operator_and_the_audit_log_which_key(store: Any, rig: Rig) -> None:
    """Of every command that leaves an event, so that no admin key's id is in a chat, a
    page or a list.
    """
    await staffed(store)
    for command in (
        RenameChat(operator(), "chat_a", "Crew"),
        AddMember(operator(), "chat_a", "eve"),
        ChangeRole(operator(), "chat_a", "eve", "admin"),
        RemoveMember(operator(), "chat_a", "eve"),
        ChangeBan(operator(), "chat_a", "carl", True),
        ChangeBan(operator(), "chat_a", "eve", True),
        ChangeMute(operator(), "chat_a", "dora", True),
        ChangeMute(operator(), "chat_a", "dora", False),
        ChangeBan(operator(), "chat_a", "carl", False),
    ):
        changed = await store.change(command)
        assert changed.event.sender_id == OPERATOR
    page = await store.read_after("chat_a", 0, *PAGE, ANN)
    assert {message.sender_id for message in page.messages[1:]} == {OPERATOR} and len(
        page.messages
    ) == 10
    assert [one.banned_by for one in await store.bans("chat_a")] == [OPERATOR]
    assert check_id(OPERATOR, "user_id") is not None, "no user has this name"
    assert {record.actor for record in (await store.audit(None, 20)).records} == {
        operator().actor.user_id
    }


@on_every_store
async def test_what_an_operator_restricted_only_an_operator_lifts(store: Any, rig: Rig) -> None:
    await staffed(store)
    await store.change(ban("eve"))
    for user_id in ("carl", "eve"):
        await store.change(ChangeBan(operator(), "chat_a", user_id, True))
        await refused(
            store,
            ban(user_id, banned=False),
            Forbidden,
            "only an operator lifts",
            f"unban {user_id} --chat chat_a",
        )
        await store.change(ban(user_id))
    assert [(one.user_id, one.by_operator) for one in await store.bans("chat_a")] == [
        ("carl", True),
        ("eve", True),
    ]
    await store.change(mute("bob"))
    for user_id in ("bob", "dora"):
        await store.change(ChangeMute(operator(), "chat_a", user_id, True))
        await store.change(mute(user_id))
        await refused(
            store,
            mute(user_id, muted=False),
            Forbidden,
            "only an operator lifts",
            f"unmute {user_id}",
        )
        await refused(
            store,
            ChangeRole(act(), "chat_a", user_id, "owner"),
            Forbidden,
            "only an operator lifts",
        )
    await store.change(ChangeRole(act(), "chat_a", "bob", "member"))
    assert {m.user_id for m in await store.members("chat_a") if m.muted_by_operator} == {
        "bob",
        "dora",
    }
    assert [r.action for r in (await store.audit(None, 10)).records] == ["member.ban"] * 2 + [
        "member.mute"
    ] * 2
    head = (await store.heads(["chat_a"]))["chat_a"].sequence
    for lifting in (ChangeBan, ChangeMute):
        for user_id in ("carl", "eve") if lifting is ChangeBan else ("bob", "dora"):
            await store.change(lifting(operator(), "chat_a", user_id, False))
    assert (await store.heads(["chat_a"]))["chat_a"].sequence == head + 4
    await store.change(ban("carl"))
    await store.change(ban("carl", banned=False)), "a new one is the chat's own again"
    await store.change(mute("dora"))
    await store.change(mute("dora", muted=False))


@on_every_store
async def test_other_member_of_a_direct_chat_does_not_lift_an_operators_mute(
    store: Any, rig: Rig
) -> None:
    await store.change(CreateChat(act(ANN), "chat_a", "direct", "", ["bob"]))
    await store.change(ChangeMute(operator(), "chat_a", "ann", True))
    await refused(store, mute("ann", BOB, muted=False), Forbidden, "only an operator lifts")


@on_every_store
async def test_repeated_ban_under_one_key_is_answered_as_the_first(store: Any, rig: Rig) -> None:
    await staffed(store)
    command = ChangeBan(act(key="k", fingerprint="f"), "chat_a", "carl", True)
    first = await store.change(command)
    await store.change(ban("carl", banned=False))
    again = await store.change(command)
    assert again.repeated and again.event == first.event and await banned(store) == []


def old_chats_file(path: Path, version: int) -> apsw.Connection:
    """A file as servers of this version wrote it: a group of ann, an owner, and bob."""
    old = apsw.Connection(str(path))
    old.execute("CREATE TABLE schema_version (version INTEGER NOT NULL) STRICT")
    for number, script in enumerate(migrations("holdfast.store.sqlite")[:version], 1):
        old.execute(script)
        old.execute("INSERT INTO schema_version VALUES (?)", (number,))
    old.execute(
        "INSERT INTO chats VALUES (1, 'chat_a', 'default', 'group', 'Team', NULL, 1, 1, NULL, 2,"
        " 'ann', 'then')"
    )
    old.execute("INSERT INTO counters VALUES (1, 0, 0)")
    for name, role in (("ann", "owner"), ("bob", "member")):
        old.execute(
            "INSERT INTO members (chat, user_id, tenant, role, joined_at) VALUES (1, ?, 'default',"
            " ?, 'then')",
            (name, role),
        )
    return old


async def test_chats_file_from_before_bans_opens_with_its_members(tmp_path: Path) -> None:
    old_chats_file(tmp_path / "chats.db", 3).close()

    async with SqliteStore(tmp_path / "chats.db") as store:
        assert await members(store) == {"ann": ("owner", False), "bob": ("member", False)}
        acked(await send(store, "k", sender=BOB))
        await store.change(mute("bob"))
        await store.change(ban("bob"))
        assert await banned(store) == ["bob"]


async def test_chats_file_with_mutes_of_members_keeps_them(tmp_path: Path) -> None:
    old = old_chats_file(tmp_path / "chats.db", 6)
    old.execute(
        "UPDATE members SET muted = 1, muted_by_operator = 1, invited = 1 WHERE user_id = 'bob'"
    )
    old.close()

    async with SqliteStore(tmp_path / "chats.db") as store:
        assert await members(store) == {"ann": ("owner", False), "bob": ("member", True)}
        assert await store.mutes("chat_a") == [Mute("bob", by_operator=True)]
        assert isinstance(await send(store, "k", sender=BOB), Forbidden)
