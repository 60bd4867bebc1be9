"""Assistants on memory adapters and virtual time: chats, sessions, jobs, a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from gateway_rig import TENANT, Bench, FakeSocket, bench, settle
from reply_rig import MODEL, FakeProvider, ReplyRig

from holdfast.clock import timestamp
from holdfast.eventlog.memory import MemoryEventLog
from holdfast.history.history import ChatHistory
from holdfast.ingest.contract import Sends
from holdfast.message import Acked, Draft, Message, User
from holdfast.store.commands import AddMember, CommandContext, CreateChat, Redact, RemoveMember
from holdfast.store.memory import MemoryStore
from holdfast.streaming.assistants.jobs import with_assistants
from holdfast.streaming.assistants.reader import AssistantReader
from holdfast.streaming.assistants.replying import AssistantDeps, AssistantReplies
from holdfast.streaming.assistants.triggers import Assistants
from holdfast.streaming.reply_log.contract import ReplyLog
from holdfast.streaming.settings import AssistantSettings
from holdfast.work.handlers import Handlers
from holdfast.work.inspection import Query
from holdfast.work.job import Policies
from holdfast.work.sqlite.store import MemoryWork
from holdfast.work.worker import Worker, WorkerSettings
from proof.virtual_loop import LoopClock

BOT = AssistantSettings(TENANT, "bot", MODEL, "Be brief.")


@dataclass
class AssistantRig:
    """One node with assistants."""

    parts: Bench
    rig: ReplyRig
    jobs: MemoryWork
    history: ChatHistory
    clock: LoopClock
    worker: Worker
    reader: AssistantReader
    replying: AssistantReplies

    async def chat(self, *users: str, kind: Any = "direct") -> str:
        chat_id, name = self.parts.ids.new("chat_"), "" if kind == "direct" else "a chat"
        await self.parts.store.change(
            CreateChat(self._act(users[0]), chat_id, kind, name, users[1:])
        )
        return chat_id

    def _act(self, user: str, *, operator: bool = False) -> CommandContext:
        at, message_id = timestamp(self.clock.now()), self.parts.ids.new("msg_")
        return CommandContext(User(TENANT, user), at, message_id, operator=operator)

    async def say(self, chat_id: str, text: str, user: str = "alice") -> Message:
        """A stored message, as the log has it."""
        ids, at = self.parts.ids, timestamp(self.clock.now())
        draft = Draft(
            User(TENANT, user), chat_id, ids.new("c_"), text, "text/plain", ids.new("msg_"), at
        )
        (outcome,) = await self.parts.store.append([draft])
        assert isinstance(outcome, Acked), outcome
        return outcome.message

    async def redact(self, message: Message) -> None:
        act = self._act("op", operator=True)
        await self.parts.store.change(Redact(act, message.chat_id, message.sequence))

    async def remove(self, chat_id: str, user: str) -> None:
        act = self._act("op", operator=True)
        await self.parts.store.change(RemoveMember(act, chat_id, user))

    async def add(self, chat_id: str, user: str) -> None:
        act = self._act("op", operator=True)
        await self.parts.store.change(AddMember(act, chat_id, user, "member"))

    async def texts(self, chat_id: str, user: str = "bot") -> list[Message]:
        page = await self.parts.store.read_after(chat_id, 0, 500, 1 << 24)
        return [m for m in page.messages if m.sender_id == user and m.kind == "text"]

    async def until_replied(self, chat_id: str, count: int = 1, user: str = "bot") -> list[str]:
        """Virtual time passes until the assistant has said this much."""
        for _ in range(20_000):
            found = await self.texts(chat_id, user)
            if len(found) >= count:
                return [message.content for message in found]
            await asyncio.sleep(0.05)
        raise AssertionError(f"no {count} messages of {user}")

    async def until(self, condition: Callable[[], object]) -> None:
        """Virtual time passes until the condition holds."""
        for _ in range(20_000):
            if condition():
                return
            await asyncio.sleep(0.1)
        raise AssertionError("it never held")

    async def idle(self) -> None:
        """Virtual time passes until no job is left."""
        for _ in range(20_000):
            await asyncio.sleep(0.5)
            if not await self.jobs.find(Query()):
                return
        raise AssertionError("jobs are left")

    async def dead(self) -> Sequence[Any]:
        return await self.jobs.dead(Query())

    async def socket(self, user: str) -> FakeSocket:
        socket = self.parts.connect(user)
        await settle()
        socket.say("resume", "r", cursors={})
        await settle()
        socket.take()
        return socket


def replies_of(socket: FakeSocket) -> list[dict[str, Any]]:
    return [f["payload"] for f in socket.take() if f["type"] in ("reply_delta", "reply_state")]


@asynccontextmanager
async def assistant_rig(
    *assistants: AssistantSettings,
    provider: FakeProvider | None = None,
    log: ReplyLog | None = None,
    sends: Sends | None = None,
    concurrency: int = 16,
    runs: bool = True,
) -> AsyncIterator[AssistantRig]:
    """``runs``: whether the reader and the worker run."""
    chosen, clock, store = Assistants(assistants or (BOT,)), LoopClock(), MemoryStore()
    rig = ReplyRig(provider=provider or FakeProvider(), **({"log": log} if log else {}))
    async with bench(store=store) as parts:
        history = parts.gateway._deps.history
        jobs, handlers = MemoryWork(clock), Handlers()
        deps = AssistantDeps(
            rig.parts, parts.gateway.replies, sends or parts.intake, history, clock
        )
        replying = AssistantReplies(chosen, deps)
        replying.register(handlers, concurrency)
        events = MemoryEventLog()
        store.on_commit(events.committed)
        reader = AssistantReader(events, chosen, jobs, store, history, clock)
        worker = Worker(
            jobs,
            handlers,
            policies=with_assistants(Policies()),
            settings=WorkerSettings(concurrency=concurrency),
            clock=clock,
        )
        made = AssistantRig(parts, rig, jobs, history, clock, worker, reader, replying)
        async with rig.running():
            if not runs:
                yield made
                return
            reading = asyncio.create_task(reader.run())
            await settle()
            async with worker.running():
                try:
                    yield made
                finally:
                    reading.cancel()
