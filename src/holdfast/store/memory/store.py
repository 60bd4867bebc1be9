"""The verbs of the contract. None awaits, so no two can interleave."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from holdfast import telemetry
from holdfast.message import (
    Ban,
    Chat,
    Cursor,
    Draft,
    LogEntry,
    LogEvent,
    Member,
    Message,
    Mute,
    Outcome,
    Page,
    PageToken,
    User,
    Watermark,
)
from holdfast.store.command_rules import decide
from holdfast.store.commands import Command, CommandContext, CommandResult, CreateChat, Redact
from holdfast.store.contract import (
    COUNTERS_LOOKED_AT,
    LOOKED_AT_ONCE,
    MEMBERSHIPS_MAX,
    ONE_LANE,
    ActivePage,
    ChatPage,
    DamagedPage,
    HaltedChat,
    HaltedChats,
    Inspection,
    TextPage,
    shard_of,
)
from holdfast.store.memory.chat import MemoryChat, group_state
from holdfast.store.memory.records import KeptAnswer, MemoryRecords
from holdfast.store.numbering import NO_COUNTER, TAKEN, GroupState, StoredSend, number
from holdfast.store.pages import (
    chat_of,
    chat_token,
    check_end,
    number_of,
    number_token,
    unknown_token,
)
from holdfast.store.plan import (
    ChangePlan,
    ChatSettings,
    CommandInputs,
    check_same,
    direct_pair,
    event_message,
    halted_chat,
    joining,
    left_where_page_ended,
    log_events,
    not_a_member,
    outside_the_list,
    target_of,
    unknown_chat,
)


class MemoryStore(MemoryRecords):
    """See ``ChatStore`` and ``Records`` of ``holdfast.store.contract``. Also a
    ``CommitSource`` without reads: the memory log has its own copy.
    """

    def __init__(self, limits: ChatSettings | None = None, shards: int = 1) -> None:
        super().__init__()
        self.grouping = replace(ONE_LANE, by="shard", at_once=shards) if shards > 1 else ONE_LANE
        self.lane = partial(shard_of, shards=shards)
        self._limits = limits or ChatSettings()
        self._chats: dict[str, MemoryChat] = {}
        self._directs: dict[tuple[str, str | None], str] = {}
        self._keys_forgotten = 0
        self._log: list[LogEntry] = []
        self._listeners: list[Callable[[Sequence[LogEntry]], None]] = []

    def on_commit(self, listener: Callable[[Sequence[LogEntry]], None]) -> None:
        """See ``holdfast.eventlog.contract.CommitSource``."""
        self._listeners.append(listener)

    async def append(self, group: Sequence[Draft]) -> list[Outcome]:
        known = self._group_state(group)
        numbered = number(group, known)
        outcomes = numbered.outcomes
        for chat_id in numbered.without_counter:
            telemetry.counter_corruption(chat_id)
            self._halt(chat_id, NO_COUNTER)
        taken = {
            m.chat_id
            for m in (s.message for s in numbered.fresh)
            if m.sequence in self._chats[m.chat_id].messages
        }
        for chat_id in taken:
            telemetry.duplicate_sequence(chat_id)
            self._halt(chat_id, TAKEN)
        fresh = [stored for stored in numbered.fresh if stored.message.chat_id not in taken]
        self._commit([self._put(stored.message, stored) for stored in fresh])
        if taken:
            refused = {id(s.message) for s in numbered.fresh if s.message.chat_id in taken}
            outcomes = [
                halted_chat(d.chat_id)
                if not isinstance(o, Exception) and id(o.message) in refused
                else o
                for d, o in zip(group, outcomes, strict=True)
            ]
        return outcomes

    async def change(self, command: Command) -> CommandResult:
        act = command.act
        if act.key is not None and (earlier := self._answers.get((act.actor, act.key))) is not None:
            check_same(act, earlier[0])
            assert isinstance(earlier[1], CommandResult), (
                "the fingerprint of a request is no command's"
            )
            return replace(earlier[1], repeated=True)
        plan = decide(command, self._inputs(command), self._limits)
        if plan.event is not None:
            self._check_numbering(plan.chat.chat_id)
        existing = isinstance(command, CreateChat) and not plan.create
        event = self._apply(plan, act)
        after = plan.chat if event is None else replace(plan.chat, head=event.sequence)
        changed = CommandResult(after, event, repeated=existing)
        if act.key is not None:
            self._answers[act.actor, act.key] = KeptAnswer(act.fingerprint, changed, act.at)
        return changed

    async def mark(self, watermarks: Sequence[Watermark]) -> None:
        for mark in watermarks:
            held = self._chats.get(mark.chat_id)
            if (
                held is None
                or held.chat.tenant != mark.user.tenant
                or mark.user.user_id not in held.members
                or mark.epoch != held.chat.epoch
            ):
                continue
            held.mark(mark)
        for chat_id, user in {(mark.chat_id, mark.user) for mark in watermarks}:
            if chat_id in self._chats:
                self._chats[chat_id].forget_devices(
                    user.user_id, self._limits.devices_per_member_max
                )

    async def read_after(
        self, chat_id: str, after: int, limit: int, bytes_max: int, reader: User | None = None
    ) -> Page:
        return self._readable(chat_id, reader).page_after(after, limit, bytes_max)

    async def read_before(
        self, chat_id: str, before: int, limit: int, bytes_max: int, reader: User | None = None
    ) -> Page:
        return self._readable(chat_id, reader).page_before(before, limit, bytes_max)

    async def heads(self, chat_ids: Iterable[str]) -> Mapping[str, Cursor]:
        return {
            c: Cursor(self._chats[c].chat.epoch, self._chats[c].head)
            for c in chat_ids
            if c in self._chats
        }

    async def memberships(
        self, users: Sequence[User], chats_max: int = MEMBERSHIPS_MAX
    ) -> Mapping[User, Mapping[str, Cursor]]:
        found: dict[User, dict[str, Cursor]] = {}
        for user in users:
            chats = {
                held.chat.chat_id: Cursor(held.chat.epoch, held.head)
                for held in self._chats_with(user)
            }
            chats_max -= len(chats)
            if chats_max < 0 and found:
                break
            found[user] = chats
        return found

    async def memberships_in(
        self, asked: Sequence[tuple[User, str]]
    ) -> Mapping[tuple[User, str], Cursor]:
        return {
            (user, chat_id): Cursor(held.chat.epoch, held.head)
            for user, chat_id in asked
            if (held := self._chats.get(chat_id)) is not None
            and held.chat.tenant == user.tenant
            and user.user_id in held.members
        }

    async def chats_of(
        self,
        user: User,
        limit: int,
        after: PageToken | None = None,
        only: Collection[str] | None = None,
    ) -> ChatPage:
        newest_first = sorted(self._chats_with(user), key=lambda held: held.activity, reverse=True)
        if after is not None:
            edge = self._edge(user, chat_of(after), only)
            newest_first = [held for held in newest_first if held.activity < edge]
        listed = [held for held in newest_first if only is None or held.chat.chat_id in only]
        chats = [held.summary(user) for held in listed[:limit]]
        return ChatPage(chats, chat_token(chats[-1].chat) if len(listed) > limit else None)

    def _edge(
        self, user: User, ended_at: tuple[str, int], only: Collection[str] | None
    ) -> tuple[int, int]:
        """The activity of the chat where a page ended, as it was then."""
        chat_id = ended_at[0]
        held = self._chats.get(chat_id)
        if only is not None and chat_id not in only:
            raise outside_the_list()
        if held is None or held.chat.tenant != user.tenant:
            raise unknown_token()
        if user.user_id not in held.members:
            raise left_where_page_ended()
        there = (o for o, m in self._messages_after(0) if (m.chat_id, m.sequence) == ended_at)
        return next(there, held.last_position), held.number

    async def chat(self, chat_id: str, reader: User | None = None) -> Chat:
        return self._readable(chat_id, reader).now()

    async def members(self, chat_id: str) -> Sequence[Member]:
        held = self._chats.get(chat_id)
        return (
            [m for user_id in sorted(held.members) if (m := held.member(user_id))] if held else []
        )

    async def bans(self, chat_id: str) -> Sequence[Ban]:
        held = self._chats.get(chat_id)
        return sorted(held.bans.values(), key=lambda ban: ban.user_id) if held else []

    async def mutes(self, chat_id: str) -> Sequence[Mute]:
        held = self._chats.get(chat_id)
        return sorted(held.mutes.values(), key=lambda mute: mute.user_id) if held else []

    async def watermarks(self, chat_id: str) -> Sequence[Watermark]:
        held = self._chats.get(chat_id)
        return (
            [
                held.marks[key]
                for key in sorted(held.marks)
                if held.marks[key].epoch == held.chat.epoch
            ]
            if held
            else []
        )

    async def inspect(self, chat_id: str) -> Inspection:
        held = self._readable(chat_id, None)
        return Inspection(
            held.now(),
            held.counter,
            held.highest,
            len(held.messages),
            held.holes(),
            tuple(held.gaps),
        )

    async def halted(self, limit: int) -> HaltedChats:
        found = [
            HaltedChat(held.chat.chat_id, held.chat.tenant, held.chat.halted)
            for held in self._chats.values()
            if held.chat.halted is not None
        ]
        return HaltedChats(len(found), sorted(found, key=lambda chat: chat.chat_id)[:limit])

    async def forget_send_keys(self, before: str, limit: int) -> int:
        forgotten = 0
        rest = self._messages_after(self._keys_forgotten)
        there = [(o, m) for o, m in rest if m.sequence in self._chats[m.chat_id].messages]
        for offset, message in there[:limit]:
            if message.created_at >= before:
                break
            self._keys_forgotten = offset
            self._chats[message.chat_id].keys.pop(
                (message.chat_id, message.sender_id, message.client_message_id or ""), None
            )
            forgotten += 1
        return forgotten

    def _messages_after(self, offset: int) -> list[tuple[int, Message]]:
        """The messages of the log past an offset, each with its own."""
        return [(e.offset, e.what) for e in self._log[offset:] if isinstance(e.what, Message)]

    async def texts_of(self, user: User, after: PageToken | None = None) -> TextPage:
        looked = self._messages_after(number_of("texts", after))[:LOOKED_AT_ONCE]
        if not looked:
            check_end(after, len(self._log))
        texts = []
        for _, message in looked:
            held = self._chats[message.chat_id]
            stored = held.messages.get(message.sequence)
            if (
                User(held.chat.tenant, message.sender_id) == user
                and message.kind == "text"
                and stored is not None
                and stored.content
            ):
                texts.append((message.chat_id, message.sequence))
        return TextPage(texts, number_token("texts", looked[-1][0]) if looked else None)

    async def active_since(self, at: str, after: PageToken | None = None) -> ActivePage:
        first = number_of("active", after)
        looked = list(self._chats.values())[first : first + LOOKED_AT_ONCE]
        if not looked:
            check_end(after, len(self._chats))
        chats = [
            (held.chat.tenant, held.chat.chat_id)
            for held in looked
            if held.messages and held.messages[held.highest].created_at >= at
        ]
        end = first + len(looked)
        return ActivePage(chats, number_token("active", end) if looked else None)

    async def damaged(self, after: PageToken | None = None) -> DamagedPage:
        first = number_of("damaged", after)
        looked = list(self._chats.values())[first : first + COUNTERS_LOOKED_AT]
        if not looked:
            check_end(after, len(self._chats))
        chats = [held.chat.chat_id for held in looked if held.damage is not None]
        end = first + len(looked)
        return DamagedPage(chats, number_token("damaged", end) if looked else None)

    async def halt_damaged(self, chat_ids: Sequence[str]) -> None:
        for chat_id in chat_ids:
            held = self._chats.get(chat_id)
            if held is not None and (why := held.damage) is not None:
                lost = why == NO_COUNTER
                (telemetry.counter_corruption if lost else telemetry.duplicate_sequence)(chat_id)
                self._halt(chat_id, why)

    async def forget_devices(self, user: User) -> None:
        for held in self._chats_with(user):
            held.marks = {key: mark for key, mark in held.marks.items() if key[0] != user.user_id}

    async def touch(self) -> None:
        pass

    def _group_state(self, group: Sequence[Draft]) -> GroupState:
        return group_state(self._chats, group)

    def _inputs(self, command: Command) -> CommandInputs:
        act = command.act
        theirs = {
            user_id: self._chats_with(User(act.actor.tenant, user_id))
            for user_id in joining(command)
        }
        chats = {user_id: len(held) for user_id, held in theirs.items()}
        invited = {
            user_id: sum(user_id in h.invited for h in held) for user_id, held in theirs.items()
        }
        held = self._chats.get(command.chat_id)
        if isinstance(command, CreateChat):
            pair = self._chats.get(self._directs.get((act.actor.tenant, direct_pair(command)), ""))
            return CommandInputs(
                held.now() if held else None,
                pair=pair.now() if pair else None,
                chats=chats,
                invited=invited,
            )
        if held is None:
            return CommandInputs(None)
        target = target_of(command) or ""
        ban = held.bans.get(target)
        return CommandInputs(
            held.now(),
            actor=held.member(act.actor.user_id),
            target=held.member(target),
            members=len(held.members),
            owners=sum(m.role == "owner" for m in held.members.values()),
            banned=ban is not None,
            banned_by_operator=ban is not None and ban.by_operator,
            bans=len(held.bans),
            mute=held.mutes.get(target),
            mutes=len(held.mutes),
            chats=chats,
            invited=invited,
            message=held.messages.get(command.sequence) if isinstance(command, Redact) else None,
            counter=held.counter,
            highest=held.highest,
            gaps=held.holes(),
        )

    def _apply(self, plan: ChangePlan, act: CommandContext) -> Message | None:
        chat_id = plan.chat.chat_id
        if plan.create:
            self._chats[chat_id] = MemoryChat(plan.chat, 0, len(self._chats), len(self._log))
            if plan.pair is not None:
                self._directs[plan.chat.tenant, plan.pair] = chat_id
        held = self._chats[chat_id]
        held.chat = plan.chat
        if plan.counter is not None:
            if held.counter is None:
                held.last_position = len(self._log)
            held.counter = plan.counter
        if plan.raised:
            held.take_marks_along()
        held.invited.update(set(plan.invited) - held.members.keys())
        held.members.update({m.user_id: m for m in plan.put})
        for user_id in plan.drop:
            del held.members[user_id]
            held.invited.discard(user_id)
            held.marks = {key: mark for key, mark in held.marks.items() if key[0] != user_id}
        if plan.ban is not None:
            held.bans[plan.ban.user_id] = plan.ban
        if plan.unban is not None:
            del held.bans[plan.unban]
        if plan.mute is not None:
            held.mutes[plan.mute.user_id] = plan.mute
        if plan.unmute is not None:
            del held.mutes[plan.unmute]
        held.gaps.extend(gap for gap in plan.gaps if gap not in held.gaps)
        if plan.forgets:
            held.forget(plan)
            self._notify([])
        if plan.record is not None:
            self._note(act, plan.record)
        message = event_message(plan, act, held.head + 1)
        entries = [self._entry(held, event) for event in log_events(plan)]
        self._commit(entries if message is None else [*entries, self._put(message, None)])
        return message

    def _put(self, message: Message, stored: StoredSend | None) -> LogEntry:
        held = self._chats[message.chat_id]
        held.messages[message.sequence] = message
        held.counter = message.sequence
        if stored is not None and message.client_message_id is not None:
            held.keys[message.chat_id, message.sender_id, message.client_message_id] = stored
        entry = self._entry(held, message)
        held.last_position = entry.offset
        return entry

    def _entry(self, held: MemoryChat, what: Message | LogEvent) -> LogEntry:
        chat = held.chat
        entry = LogEntry(0, len(self._log) + 1, chat.tenant, chat.chat_id, chat.epoch, what)
        self._log.append(entry)
        return entry

    def _commit(self, entries: Sequence[LogEntry]) -> None:
        if entries:
            self._notify(entries)

    def _notify(self, entries: Sequence[LogEntry]) -> None:
        for listener in self._listeners:
            listener(entries)

    def _check_numbering(self, chat_id: str) -> None:
        """Halt the chat if it cannot allocate its next sequence."""
        held = self._chats[chat_id]
        if held.counter is None:
            telemetry.counter_corruption(chat_id)
            self._halt(chat_id, NO_COUNTER)
            raise halted_chat(chat_id)
        if held.counter + 1 in held.messages:
            telemetry.duplicate_sequence(chat_id)
            self._halt(chat_id, TAKEN)
            raise halted_chat(chat_id)

    def _halt(self, chat_id: str, why: str) -> None:
        held = self._chats[chat_id]
        held.chat = replace(held.chat, halted=why)

    def _chats_with(self, user: User) -> list[MemoryChat]:
        return [
            h
            for h in self._chats.values()
            if h.chat.tenant == user.tenant and user.user_id in h.members
        ]

    def _readable(self, chat_id: str, reader: User | None) -> MemoryChat:
        held = self._chats.get(chat_id)
        if held is None or (reader is not None and reader.tenant != held.chat.tenant):
            raise unknown_chat(chat_id)
        if reader is not None and reader.user_id not in held.members:
            raise not_a_member(chat_id)
        return held
