"""A durability plane whose every answer the test decides, and the values tests use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace
from store_rigs import create

from holdfast.message import Acked, Draft, Message, Outcome, User, Watermark
from holdfast.store.commands import Command, CommandResult
from holdfast.store.contract import ONE_LANE
from holdfast.store.memory import MemoryStore
from holdfast.wire.frames import SendBody

ANNA, BELA, CLEO = (User("default", name) for name in ("anna", "bela", "cleo"))
CHAT = "chat_1"


def body(key: str, chat_id: str = CHAT, content: str = "hello") -> SendBody:
    return SendBody(client_message_id=key, chat_id=chat_id, content=content)


async def create_chat(
    store: MemoryStore, *members: User, chat_id: str = CHAT, owner: User = ANNA
) -> None:
    others = tuple(user.user_id for user in members if user != owner)
    await create(store, *others, chat_id=chat_id, creator=owner)


def stored(draft: Draft, sequence: int) -> Message:
    return Message(
        message_id=draft.message_id,
        chat_id=draft.chat_id,
        sequence=sequence,
        kind="text",
        sender_id=draft.sender.user_id,
        client_message_id=draft.client_message_id,
        content=draft.content,
        content_type=draft.content_type,
        created_at=draft.created_at,
    )


def acks(drafts: Sequence[Draft]) -> list[Outcome]:
    return [Acked(stored(draft, n), False) for n, draft in enumerate(drafts, 1)]


class ScriptedStore:
    """The writing verbs of a store; each call waits for its gate, then gives what the
    test put in place.

    With several lanes a chat is in the lane that the number in its name gives. A lane
    can be held for itself; so can all "changes", and "marks", which belong to no lane.
    """

    def __init__(self, lanes: int = 1, at_once: int = 1) -> None:
        self.grouping = replace(ONE_LANE, by="any" if lanes == 1 else "shard", at_once=at_once)
        self._lanes = lanes
        self._held: dict[int | str, asyncio.Event] = {}
        self.groups: list[Sequence[Draft]] = []
        self.commands: list[Command] = []
        self.marked: list[Sequence[Watermark]] = []
        self.touched = 0
        self.ended = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.answer: Callable[[Sequence[Draft]], list[Outcome]] = acks
        self.error: BaseException | None = None

    def lane(self, chat_id: str) -> int:
        return int(chat_id.rpartition("_")[2] or 0) % self._lanes if self._lanes > 1 else 0

    def hold(self, *lanes: int | str) -> None:
        self._held.update({lane: asyncio.Event() for lane in lanes})

    def release(self, *lanes: int | str) -> None:
        for lane in lanes:
            self._held.pop(lane).set()

    async def append(self, group: Sequence[Draft]) -> list[Outcome]:
        self.groups.append(group)
        lanes = {self.lane(draft.chat_id) for draft in group}
        assert len(lanes) == 1, f"one group of the lanes {lanes}"
        await self._pass(*lanes)
        return self.answer(group)

    async def change(self, command: Command) -> CommandResult:
        self.commands.append(command)
        await self._pass("changes", self.lane(command.chat_id))
        raise AssertionError("a test that changes chats uses the memory store")

    async def mark(self, watermarks: Sequence[Watermark]) -> None:
        self.marked.append(watermarks)
        await self._pass("marks")

    async def touch(self) -> None:
        self.touched += 1
        await self._pass("marks")

    async def _pass(self, *names: int | str) -> None:
        await self.gate.wait()
        for name in names:
            if name in self._held:
                await self._held[name].wait()
        self.ended += 1
        if self.error is not None:
            raise self.error


class Answers:
    """Who was answered what, in order; each at most once."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.by_key: dict[str, Any] = {}

    def to(self, key: str) -> Callable[[Outcome], None]:
        def answer(outcome: Outcome) -> None:
            assert key not in self.by_key, f"{key} was answered twice"
            self.order.append(key)
            self.by_key[key] = outcome

        return answer

    def codes(self) -> dict[str, str]:
        return {key: "ACK" if isinstance(o, Acked) else o.code for key, o in self.by_key.items()}
