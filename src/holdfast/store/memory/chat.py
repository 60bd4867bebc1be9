"""One chat in memory, and the reads that concern only this chat."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from holdfast.message import Ban, Chat, Draft, Member, Message, Mute, Page, User, Watermark
from holdfast.store.contract import UNREAD_LOOKED_AT, ChatSummary
from holdfast.store.numbering import NO_COUNTER, TAKEN, ChatState, GroupState, StoredSend
from holdfast.store.pages import ENVELOPE_BYTES, page_after, page_before, within
from holdfast.store.plan import ChangePlan


class MemoryChat(Struct):
    """One chat with all of its state. ``chat.head`` may be stale; use ``counter``."""

    chat: Chat
    counter: int | None
    number: int
    """Chats are numbered in the order of their creation."""
    last_position: int
    members: dict[str, Member] = field(default_factory=dict)
    """Without mutes; ``member`` adds them."""
    invited: set[str] = field(default_factory=set)
    """The members whom another user's token added."""
    bans: dict[str, Ban] = field(default_factory=dict)
    mutes: dict[str, Mute] = field(default_factory=dict)
    messages: dict[int, Message] = field(default_factory=dict)
    keys: dict[tuple[str, str, str], StoredSend] = field(default_factory=dict)
    marks: dict[tuple[str, str], Watermark] = field(default_factory=dict)
    gaps: list[tuple[int, int]] = field(default_factory=list)

    @property
    def highest(self) -> int:
        return max(self.messages, default=0)

    @property
    def damage(self) -> str | None:
        """Why a chat that is not halted should be."""
        if self.chat.halted is not None:
            return None
        if self.counter is None:
            return NO_COUNTER
        return TAKEN if self.highest > self.counter else None

    @property
    def head(self) -> int:
        return self.counter if self.counter is not None else self.highest

    @property
    def activity(self) -> tuple[int, int]:
        return (self.last_position, self.number)

    def member(self, user_id: str) -> Member | None:
        member, mute = self.members.get(user_id), self.mutes.get(user_id)
        if member is None:
            return None
        return replace(
            member, muted=mute is not None, muted_by_operator=mute is not None and mute.by_operator
        )

    def now(self) -> Chat:
        return replace(self.chat, head=self.head)

    def mark(self, mark: Watermark) -> None:
        key = (mark.user.user_id, mark.device_id)
        earlier = self.marks.get(key)
        if earlier is not None and earlier.epoch == mark.epoch:
            mark = replace(
                mark,
                delivered=max(mark.delivered, earlier.delivered),
                read=max(mark.read, earlier.read),
            )
        self.marks[key] = mark

    def take_marks_along(self) -> None:
        """Carry watermarks of the previous epoch into the new one, up to the head."""
        epoch, head = self.chat.epoch, self.head
        for key, mark in self.marks.items():
            if mark.epoch == epoch - 1:
                self.marks[key] = replace(
                    mark,
                    epoch=epoch,
                    delivered=min(mark.delivered, head),
                    read=min(mark.read, head),
                )

    def forget_devices(self, user_id: str, devices_max: int) -> None:
        """Merge the named devices furthest behind into the one without a name."""
        named = [
            mark for (user, device_id), mark in self.marks.items() if user == user_id and device_id
        ]
        named.sort(
            key=lambda mark: (mark.epoch, mark.delivered, mark.read, mark.device_id), reverse=True
        )
        for mark in named[devices_max:]:
            del self.marks[user_id, mark.device_id]
            if mark.epoch == self.chat.epoch:
                self.mark(replace(mark, device_id=""))

    def holes(self) -> list[tuple[int, int]]:
        """The ranges between first_sequence and head without stored messages."""
        found: list[tuple[int, int]] = []
        expected = self.chat.first_sequence
        for sequence in [*sorted(self.messages), max(self.head, self.highest) + 1]:
            if sequence > expected:
                found.append((expected, sequence - 1))
            expected = sequence + 1
        return found

    def page_after(self, after: int, limit: int, bytes_max: int) -> Page:
        sequences = sorted(self.messages)
        rest = sequences[bisect_right(sequences, after) :]
        messages, _ = within(
            [self.messages[s] for s in rest[: max(limit, 1)]], bytes_max - ENVELOPE_BYTES
        )
        return page_after(self.now(), messages, len(messages) < len(rest))

    def page_before(self, before: int, limit: int, bytes_max: int) -> Page:
        sequences = sorted(self.messages)
        rest = sequences[: bisect_left(sequences, before)][::-1]
        messages, _ = within(
            [self.messages[s] for s in rest[: max(limit, 1)]], bytes_max - ENVELOPE_BYTES
        )
        return page_before(self.now(), before, messages[::-1], len(messages) < len(rest))

    def summary(self, user: User) -> ChatSummary:
        marks = (
            m
            for (u, _), m in self.marks.items()
            if u == user.user_id and m.epoch == self.chat.epoch
        )
        read = max((mark.read for mark in marks), default=0)
        looked_after = self.head - UNREAD_LOOKED_AT
        recent = [self.messages.get(n) for n in range(max(read, looked_after) + 1, self.head + 1)]
        news = [
            m
            for m in recent
            if m is not None and m.kind == "text" and m.sender_id != user.user_id and m.content
        ]
        others = [u for u in sorted(self.members) if u != user.user_id]
        return ChatSummary(
            chat=self.now(),
            role=self.members[user.user_id].role,
            title=", ".join(others) if self.chat.kind == "direct" else self.chat.name,
            members=len(self.members),
            unread=len(news),
            unread_capped=max(read, self.chat.first_sequence - 1) < looked_after,
            read=read,
            last_message=self.messages.get(self.head),
        )

    def forget(self, plan: ChangePlan) -> None:
        """Apply a redaction, an erasure or a retention."""
        for sequence in self._emptied(plan):
            redacted = self.messages[sequence] = replace(self.messages[sequence], content="")
            for key, stored in self.keys.items():
                if stored.message.sequence == sequence:
                    self.keys[key] = StoredSend(redacted, None)
        for sequence in [s for s in self.messages if plan.retain and s < plan.chat.first_sequence]:
            gone = self.messages.pop(sequence)
            if gone.client_message_id is not None:
                del self.keys[gone.chat_id, gone.sender_id, gone.client_message_id]

    def _emptied(self, plan: ChangePlan) -> list[int]:
        """The sequences of the messages that lose their content."""
        if plan.redact is not None:
            return [plan.redact]
        if plan.erase is None:
            return []
        wanted = [self.messages.get(sequence) for sequence in plan.erase.sequences]
        return [
            m.sequence
            for m in wanted
            if m and m.sender_id == plan.erase.user_id and m.kind == "text"
        ]


def group_state(chats: Mapping[str, MemoryChat], group: Sequence[Draft]) -> GroupState:
    """What the numbering of a group needs to know."""
    held = {d.chat_id: chats[d.chat_id] for d in group if d.chat_id in chats}
    present = {
        (d.chat_id, d.sender.user_id): held[d.chat_id].members[d.sender.user_id]
        for d in group
        if d.chat_id in held and d.sender.user_id in held[d.chat_id].members
    }
    return GroupState(
        chats={
            c: ChatState(h.chat.tenant, h.chat.halted, h.counter, h.chat.epoch)
            for c, h in held.items()
        },
        members=present,
        muted={
            (chat_id, user_id) for chat_id, user_id in present if user_id in held[chat_id].mutes
        },
        keys={
            d.key: held[d.chat_id].keys[d.key]
            for d in group
            if d.chat_id in held and d.key in held[d.chat_id].keys
        },
    )
