"""The reference and the adapters agree: the same seeded commands and sends, the same
answers and the same end.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from store_rigs import AT, MemoryRig, PostgresRig, SqliteRig

from engines import Server
from holdfast.errors import HoldfastError
from holdfast.eventlog.contract import START
from holdfast.eventlog.postgres import PostgresEventLog
from holdfast.message import (
    Acked,
    ChatCreated,
    Draft,
    EpochRaised,
    LogEntry,
    Message,
    Page,
    User,
    Watermark,
)
from holdfast.store.commands import (
    AddMember,
    ChangeBan,
    ChangeMute,
    ChangeRole,
    CommandContext,
    CommandResult,
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
from holdfast.store.contract import ChatPage, ChatSummary
from holdfast.store.plan import ChatSettings

USERS = [User("default", name) for name in ("ann", "bob", "carl", "dora")] + [User("other", "ann")]
CHATS = [f"chat_{n}" for n in range(6)]
LIMITS = ChatSettings(
    members_max=4, members_at_creation_max=3, chats_per_user_max=4, devices_per_member_max=2
)
STEPS = 150


class Steps:
    """An endless seeded stream of calls to a store; the same for every store."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.number = 0

    def act(self) -> CommandContext:
        self.number += 1
        key = f"key-{self.rng.randrange(40)}" if self.rng.random() < 0.3 else None
        return CommandContext(
            self.rng.choice(USERS),
            AT,
            f"msg_{self.number}",
            operator=self.rng.random() < 0.3,
            reason="why",
            key=key,
            fingerprint=self.rng.choice("fg"),
        )

    def draft(self) -> Draft:
        self.number += 1
        content = self.rng.choice(("one", "two", "three" * 50))
        key = f"k{self.rng.randrange(30)}"
        return Draft(
            self.rng.choice(USERS),
            self.rng.choice(CHATS),
            key,
            content,
            "text/plain",
            f"msg_{self.number}",
            AT,
        )

    def command(self) -> Any:
        act, chat, user = self.act(), self.rng.choice(CHATS), self.rng.choice(USERS).user_id
        role = self.rng.choice(("owner", "admin", "member"))
        number = self.rng.randrange(12)
        makers = [
            lambda: CreateChat(
                act, chat, self.rng.choice(("group", "group", "direct")), "T", [user]
            ),
            lambda: CreateChat(act, chat, "direct", "", [user]),
            lambda: AddMember(act, chat, user, role),
            lambda: AddMember(act, chat, user),
            lambda: RemoveMember(act, chat, user),
            lambda: RemoveMember(act, chat, act.actor.user_id),
            lambda: ChangeRole(act, chat, user, role),
            lambda: ChangeBan(act, chat, user, self.rng.random() < 0.5),
            lambda: ChangeMute(act, chat, user, self.rng.random() < 0.6),
            lambda: RenameChat(act, chat, self.rng.choice(("A", "B", ""))),
            lambda: Redact(act, chat, number),
            lambda: Retain(act, chat, number // 3),
            lambda: HaltChat(act, chat),
            lambda: RecoverChat(act, chat),
            lambda: RecoverChat(act, chat),
            lambda: RaiseEpoch(act, chat, number // 4),
        ]
        return self.rng.choice(makers)()

    def marks(self) -> list[Watermark]:
        return [
            Watermark(
                self.rng.choice(USERS),
                self.rng.choice(("", "p", "q", "r", "s")),
                self.rng.choice(CHATS),
                self.rng.randrange(3),
                self.rng.randrange(9),
                self.rng.randrange(9),
            )
            for _ in range(3)
        ]

    async def one(self, store: Any, rig: Any) -> Any:
        """Do the next thing; what came of it."""
        dice = self.rng.random()
        if dice < 0.5:
            return [
                answer(o)
                for o in await store.append([self.draft() for _ in range(self.rng.randint(1, 8))])
            ]
        if dice < 0.95:
            return await attempt(store.change(self.command()))
        if dice < 0.97 and (known := sorted(await store.heads(CHATS))):
            rig.lose_counter(self.rng.choice(known))
            return None
        return await store.mark(self.marks())


def answer(outcome: Any) -> Any:
    return (
        (type(outcome), outcome.message, outcome.details)
        if isinstance(outcome, HoldfastError)
        else outcome
    )


async def attempt(call: Any) -> Any:
    try:
        return await call
    except HoldfastError as error:
        return answer(error)


async def everything(store: Any) -> list[Any]:
    """All that can be read."""
    seen: list[Any] = [await store.heads(CHATS), list((await store.audit(None, 1_000)).records)]
    for chat in CHATS:
        seen.append(list(await store.members(chat)))
        seen += [list(await store.bans(chat)), list(await store.mutes(chat))]
        seen.append(list(await store.watermarks(chat)))
        inspection = await attempt(store.inspect(chat))
        if not isinstance(inspection, tuple):
            gaps = (
                [tuple(g) for g in inspection.gaps],
                [tuple(g) for g in inspection.recorded_gaps],
            )
            seen.append(
                (inspection.chat, inspection.counter, inspection.highest, inspection.count, gaps)
            )
        for user in (None, *USERS):
            seen.append(await attempt(store.read_after(chat, 4, 3, 700, user)))
            seen.append(await attempt(store.read_before(chat, 4, 3, 700, user)))
    seen.append(dict(await store.memberships(USERS)))
    seen += [(await store.chats_of(user, 9)) for user in USERS]
    return seen


def members_by_the_log(commits: list[list[LogEntry]]) -> dict[str, set[str]]:
    """Who is in which chat, for somebody who only reads the log."""
    members: dict[str, set[str]] = {}
    muted: dict[str, set[str]] = {}
    for entry in (entry for entries in commits for entry in entries):
        message = entry.what
        if isinstance(message, ChatCreated):
            assert entry.chat_id not in members and entry.epoch == 1
            members[entry.chat_id], muted[entry.chat_id] = set(message.members), set()
        elif isinstance(message, EpochRaised):
            assert entry.epoch > 1
        elif message.kind == "event":
            event = msgspec.json.decode(message.content, type=MembershipEvent)
            if event.event == "member_added" and event.user_id:
                members[message.chat_id].add(event.user_id)
                still = event.user_id in muted[message.chat_id] and event.role != "owner"
                assert event.muted is still, "who comes back muted is seen to be"
            elif event.event == "member_removed" and event.user_id:
                members[message.chat_id].remove(event.user_id)
            if event.event == "member_muted" and event.user_id:
                muted[message.chat_id].add(event.user_id)
            elif event.event == "member_unmuted" or event.role == "owner":
                muted[message.chat_id].discard(event.user_id or "")
        else:
            assert message.sender_id not in muted[message.chat_id], "nor who is muted there"
            assert message.sender_id in members[message.chat_id], (
                "nobody posts who is not in at that place of the log"
            )
    return members


@pytest.mark.parametrize("seed", range(20))
async def test_the_member_set_is_exact_at_each_place_of_the_log(seed: int) -> None:
    rig = MemoryRig()
    rig.limits = LIMITS
    async with rig.open() as store:
        commits: list[list[LogEntry]] = []
        store.on_commit(lambda entries: commits.append(list(entries)))
        steps = Steps(seed)
        for _ in range(2 * STEPS):
            await steps.one(store, rig)
        by_the_log = members_by_the_log(commits)
        assert by_the_log.keys() == (await store.heads(CHATS)).keys()
        for chat_id in by_the_log:
            members = {m.user_id: m.role for m in await store.members(chat_id)}
            assert by_the_log[chat_id] == set(members)
            assert not members.keys() & {ban.user_id for ban in await store.bans(chat_id)}, (
                "nobody banned is in"
            )
            assert not any(m.muted and m.role == "owner" for m in await store.members(chat_id))
            chat = await store.chat(chat_id)
            assert (
                len(members) == 2 if chat.kind == "direct" else len(members) <= LIMITS.members_max
            )
            assert chat.kind == "direct" or not members or "owner" in members.values(), (
                "somebody rules"
            )


@pytest.mark.parametrize("seed", range(12))
async def test_memory_and_sqlite_agree_on_every_answer_and_on_the_end(
    seed: int, tmp_path: Path
) -> None:
    memory, sqlite = MemoryRig(), SqliteRig(tmp_path)
    memory.limits = sqlite.limits = LIMITS
    async with memory.open() as reference, sqlite.open() as store:
        heard: tuple[list[Any], list[Any]] = ([], [])
        reference.on_commit(lambda entries: heard[0].append(list(entries)))
        store.on_commit(lambda entries: heard[1].append(list(entries)))
        expected, got = Steps(seed), Steps(seed)
        for step in range(STEPS):
            wanted, came = await expected.one(reference, memory), await got.one(store, sqlite)
            assert came == wanted, f"step {step}"
        assert await everything(store) == await everything(reference)
        assert heard[1] == heard[0], "the same entries at the same positions"


@pytest.mark.parametrize("seed", range(4))
async def test_memory_and_postgres_agree_on_every_answer_and_on_the_end(
    seed: int, postgres_server: Server
) -> None:
    """Except when a message was stamped, and where chats without a counter are listed:
    PostgreSQL has its own clock.
    """
    memory, postgres = MemoryRig(), PostgresRig(postgres_server.url)
    memory.limits = postgres.limits = LIMITS
    async with memory.open() as reference, postgres.open() as store:
        heard: list[LogEntry] = []
        reference.on_commit(heard.extend)
        expected, got = Steps(seed), Steps(seed)
        for step in range(STEPS):
            wanted, came = await expected.one(reference, memory), await got.one(store, postgres)
            assert undated(came) == undated(wanted), f"step {step}"
        assert undated(await everything(store)) == undated(await everything(reference))
        for chat_id in await store.heads(CHATS):
            of_chat = [e.what for e in heard if e.chat_id == chat_id]
            assert await log_of(store, chat_id) == undated(as_stored(of_chat, reference, chat_id))


async def log_of(store: Any, chat_id: str) -> Any:
    """What the log says of a chat."""
    entries, _ = await PostgresEventLog(store).read(START, 10_000)
    return undated([e.what for e in entries if e.chat_id == chat_id])


def as_stored(entries: list[Any], reference: Any, chat_id: str) -> list[Any]:
    """Entries as a log has them that is read from the store: what was redacted since is
    empty, what was deleted is gone.
    """
    messages = reference._chats[chat_id].messages
    return [
        messages[e.sequence] if isinstance(e, Message) else e
        for e in entries
        if not isinstance(e, Message) or e.sequence in messages
    ]


def undated(value: Any) -> Any:
    """A value without what the clock of a store decides."""
    match value:
        case Message():
            return replace(value, created_at="")
        case Acked() | CommandResult() | Page() | ChatSummary():
            return type(value)(
                **{name: undated(getattr(value, name)) for name in value.__struct_fields__}
            )
        case ChatPage():
            chats = sorted(value.chats, key=lambda summary: summary.chat.chat_id)
            return [undated(summary) for summary in chats]
        case list() | tuple() if not hasattr(value, "_fields"):
            return [undated(each) for each in value]
        case _:
            return value
