"""From a batch of the log to what one gateway does with it. (Pure.)

``route`` divides a batch, chat by chat, into steps. A step is a run of consecutive
messages of one chat, in one epoch, and the entry that ends it: a membership event, the
creation of a chat or the raise of its epoch. So the gateway's roster is exact for every
message: a user who leaves gets the event of leaving and nothing after it. Messages of
chats without a session on this node make no step.

``Gaps`` checks on the same entries that no sequence is missing between two neighbours
of a chat. Sequences are dense by construction, so a gap is an operator's repair or a
defect, and is reported either way.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from holdfast.message import AllEpochsRaised, LogEntry, Message


class DeliveryStep:
    """Messages to deliver, perhaps none, and then the entry to apply, if any."""

    __slots__ = ("chat_id", "ends_with", "epoch", "messages", "tenant")

    def __init__(self, entry: LogEntry) -> None:
        self.tenant = entry.tenant
        self.chat_id = entry.chat_id
        self.epoch = entry.epoch
        self.messages: list[Message] = []
        self.ends_with: LogEntry | None = None


def route(entries: Iterable[LogEntry], chats: Container[str]) -> list[DeliveryStep]:
    """The steps of a batch; ``chats`` are those with a session on this node."""
    steps: list[DeliveryStep] = []
    open_steps: dict[str, DeliveryStep] = {}
    for entry in entries:
        chat_id, what = entry.chat_id, entry.what
        if isinstance(what, Message):
            is_here = chat_id in chats
            if not is_here and what.kind == "text":
                continue  # most entries, where there are many nodes
            step = open_steps.get(chat_id)
            if (
                step is None
                or step.epoch != entry.epoch
                or step.messages[-1].sequence + 1 != what.sequence
            ):
                step = open_steps[chat_id] = DeliveryStep(entry)
                steps.append(step)
            if is_here:
                step.messages.append(what)
            if what.kind == "text":
                continue
        elif isinstance(what, AllEpochsRaised):
            continue  # of no chat: the feed acts on it
        else:
            step = DeliveryStep(entry)
            steps.append(step)
        step.ends_with = entry
        open_steps.pop(chat_id, None)
    return steps


MAX_CHATS = 100_000
"""Chats watched at once. At the bound all are forgotten, and watching starts over."""


class Gaps:
    """Remembers each chat's newest sequence."""

    def __init__(self, max_chats: int = MAX_CHATS) -> None:
        self._max_chats = max_chats
        self._newest: dict[str, int] = {}

    def missing(self, entries: Iterable[LogEntry]) -> int:
        """How many sequences are missing before these entries. A repeat is no gap."""
        missing = 0
        newest = self._newest
        for entry in entries:
            message = entry.what
            if not isinstance(message, Message):
                continue
            last = newest.get(message.chat_id)
            if last is None:
                if len(newest) >= self._max_chats:
                    newest.clear()
            elif message.sequence > last + 1:
                missing += message.sequence - last - 1
            if last is None or message.sequence > last:
                newest[message.chat_id] = message.sequence
        return missing
