"""Users and operators of a run: they send, read, and change chats."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from holdfast.clock import timestamp
from holdfast.errors import HoldfastError
from holdfast.message import Cursor, User
from holdfast.store.commands import (
    AddMember,
    ChangeBan,
    ChangeMute,
    Command,
    CommandContext,
    CreateChat,
    HaltChat,
    RecoverChat,
    Redact,
    RemoveMember,
    Retain,
)
from holdfast.verify.history import Fail, Ok, PageSeen
from proof.simulation.device import Device

if TYPE_CHECKING:
    from proof.simulation.world import World

Act = Callable[[], Awaitable[None]]
TENANT = "acme"
OWNER = User(TENANT, "ann")
USERS = (OWNER, User(TENANT, "bob"), User(TENANT, "cal"))
STRANGER = User("other", "eve")
READERS = {"ann over REST": OWNER, "eve over REST": STRANGER}
ELSEWHERE = "chat_other"
LOOKS = 4
BURST_PAGES = 4
HALTED_SECONDS_MAX = 3.0
CHANGE_SECONDS = 5.0


class People:
    """What people do in one run. ``founders`` are the first members of each chat."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng
        self.founders: dict[str, list[str]] = {}
        self._founded = 0

    def acts(self) -> list[tuple[Act, int]]:
        options = self._world.options
        return [
            (self._change_members, options.membership_changes),
            (self._found_chat, options.new_chats),
            (self._redact, options.redactions),
            (self._burst, options.bursts),
            (self._recover, options.recoveries),
            (self._halt, options.halts),
            (self._retain, options.retentions),
            (self._look, LOOKS),
        ]

    async def found_chats(self) -> None:
        store, users = self._world.disk.store, [user.user_id for user in USERS]
        for number in range(self._world.options.chats):
            chat_id, name = f"chat_{number}", f"chat {number}"
            await store.change(CreateChat(self._act(OWNER), chat_id, "group", name, users))
            self.founders[chat_id] = users
        await store.change(CreateChat(self._act(STRANGER), ELSEWHERE, "group", "elsewhere", []))
        self.founders[ELSEWHERE] = [STRANGER.user_id]

    async def talk(self, device: Device) -> None:
        """Send; keys may repeat between users, not between one user's devices."""
        options = self._world.options
        for number in range(options.sends_per_device):
            await asyncio.sleep(self._rng.expovariate(options.sends_per_device / options.seconds))
            key = f"{self._turn(device)}-{number}"
            device.send(self.some_chat(), key, f"{device.name} says {number}")

    def _turn(self, device: Device) -> int:
        return self._world.devices.index(device) // len(USERS)

    async def _change_members(self) -> None:
        store = self._world.disk.store
        chat_id, user = self.some_chat(), self._rng.choice(USERS[1:]).user_id
        members = {member.user_id: member for member in await store.members(chat_id)}
        banned = any(ban.user_id == user for ban in await store.bans(chat_id))
        command: Command
        if banned:
            command = ChangeBan(self._act(OWNER), chat_id, user, False)
        elif user not in members:
            command = AddMember(self._act(OWNER), chat_id, user)
        elif (dice := self._rng.random()) < 0.4:
            command = ChangeMute(self._act(OWNER), chat_id, user, not members[user].muted)
        elif dice < 0.7:
            command = ChangeBan(self._act(OWNER), chat_id, user, True)
        else:
            command = RemoveMember(self._act(OWNER), chat_id, user)
        await self._try_change(command)

    async def _found_chat(self) -> None:
        """Create a chat while its members are connected."""
        self._founded += 1
        chat_id, users = f"chat_new_{self._founded}", [user.user_id for user in USERS]
        command = CreateChat(self._act(OWNER), chat_id, "group", "a new chat", users)
        await self._world.disk.store.change(command)
        self.founders[chat_id] = users
        for device in self._world.devices:
            device.send(chat_id, f"{self._turn(device)}-new", f"{device.name} says hello")

    async def _look(self) -> None:
        """Read over REST, as a member and as a user of another tenant."""
        chat_id, cursor = self.some_chat(), Cursor(1, 0)
        clock, record = self._world.clock, self._world.record
        for name, user in READERS.items():
            server = self._world.some_server(name)
            if server is None:
                return
            op = record.invoke(clock.monotonic(), name, "sync", chat_id, cursors={chat_id: cursor})
            reading = server.link.start(
                lambda server=server, user=user: server.history.sync(user, chat_id, cursor, 500)  # type: ignore[misc]
            )
            try:
                pages = [PageSeen.of(await reading, cursor)]
                record.note(Ok(at=clock.monotonic(), op=op, pages=pages))
            except HoldfastError as error:
                record.note(Fail(at=clock.monotonic(), op=op, code=error.code))

    async def _burst(self) -> None:
        """Request several pages at once, as other clients may."""
        self._world.somebody().ask_at_once(self.some_chat(), BURST_PAGES)

    async def _redact(self) -> None:
        chat_id = self.some_chat()
        if head := await self._head(chat_id):
            await self._try_change(Redact(self._act(OWNER), chat_id, self._rng.randint(1, head)))

    async def _recover(self) -> None:
        """An operator raises a chat's epoch: every device reads it again."""
        await self.recover(self.some_chat())

    async def recover(self, chat_id: str) -> None:
        await self._try_change(RecoverChat(self._operator(), chat_id))

    async def _halt(self) -> None:
        """An operator halts and recovers a chat, after healing if that fails."""
        chat_id = self.some_chat()
        await self._try_change(HaltChat(self._operator(), chat_id))
        await asyncio.sleep(self._rng.uniform(0, HALTED_SECONDS_MAX))
        await self.recover(chat_id)

    async def _retain(self) -> None:
        """Delete the beginning of a chat, perhaps before all devices have it."""
        chat_id = self.some_chat()
        first = self._rng.randint(1, await self._head(chat_id) + 1)
        await self._try_change(Retain(self._operator(), chat_id, first))

    async def _head(self, chat_id: str) -> int:
        return (await self._world.disk.store.heads([chat_id]))[chat_id].sequence

    def _act(self, user: User) -> CommandContext:
        at = timestamp(self._world.clock.now())
        return CommandContext(user, at, self._world.ids.new("msg_"))

    def _operator(self) -> CommandContext:
        return replace(self._act(OWNER), operator=True, reason="a drill")

    async def _try_change(self, command: Command) -> None:
        """Change a chat through a node's ingest, with the faults of a send."""
        server = self._world.some_server()
        if server is not None:
            by = self._world.clock.monotonic() + CHANGE_SECONDS
            try:
                await server.link.start(lambda: server.durability.change(command, by))
            except HoldfastError:
                pass

    def some_chat(self) -> str:
        return self._rng.choice([each for each in self.founders if each != ELSEWHERE])
