"""A bounded workload against a running server, or several nodes of a cluster:
``holdfast verify URL…``.

It acts as users would: it creates chats, sends in them from several devices, cuts its
own connections, sends some messages twice under one id, connects one device twice, and
tries to read and write as a stranger. Then it waits until every device has every
message and reads the chats once more. The result is a history; ``JUDGED`` names the
checkers that the history of clients alone can feed.

At the end all members leave the chats, and an operator deletes the messages. A chat
itself cannot be deleted; ``Workload.left`` says what remains.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from holdfast.bounds import positive
from holdfast.client import ClientSettings
from holdfast.errors import HoldfastError, Unavailable
from holdfast.message import Cursor, Message, User
from holdfast.verify.history import (
    ChatAtEnd,
    ClientSeen,
    Fail,
    FaultWindow,
    Header,
    MembershipSpan,
    Ok,
    PageSeen,
    Recorder,
    Sighting,
    Unknown,
    digest,
)
from holdfast.verify.recording import RecordingClient

JUDGED = (1, 2, 3, 4, 5, 7, 8, 9, 12)
QUICK = ClientSettings(reconnect_initial_seconds=0.1, reconnect_cap_seconds=2.0)
PAGE_MESSAGES = 500
_AGAIN = 0.1


DELETIONS_MAX = 20
"""The most calls per chat; each deletes as much as fits into its deadline."""


class RestApi(Protocol):
    """The REST API for one credential; calls block, raise ``holdfast.errors``."""

    def get(self, *path: str, **query: Any) -> Any: ...

    def post(self, *path: str, body: Mapping[str, Any], key: str | None = None) -> Any: ...

    def delete(self, *path: str, **query: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Account:
    """A user with a token and a REST client."""

    user: User
    token: str
    rest: RestApi


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    """The size of a run. Each device sends below the server's default rate limit."""

    seconds: float = 10
    chats: int = 2
    devices: int = 3
    sends_per_second: float = 4
    cut_every_seconds: float = 2
    settle_seconds: float = 30

    def __post_init__(self) -> None:
        positive(self, *self.__slots__)


@dataclass(frozen=True, slots=True)
class WorkloadProgress:
    """The progress of a run."""

    doing: str
    seconds: float
    sends: int
    cuts: int


class Workload:
    """One run. The devices are those of ``members``, in turn, and connect to ``urls``,
    in turn; ``stranger`` is in no chat and must get nothing; ``operator``, if given,
    deletes the messages at the end.
    """

    def __init__(
        self,
        urls: Sequence[str],
        members: Sequence[Account],
        stranger: Account | None,
        settings: WorkloadSettings,
        seed: int,
        operator: RestApi | None = None,
    ) -> None:
        self._urls = urls
        self._operator = operator
        self._members = members
        self._stranger = stranger
        self._settings = settings
        self._rng = random.Random(seed)
        where = " ".join(urls)
        notes = {
            "url": where,
            "checkers": [number for number in JUDGED if number != 12 or stranger],
        }
        self.record = Recorder(Header(at=time.monotonic(), seed=seed, notes=notes))
        self.name = f"holdfast verify {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}"
        self.chats: list[str] = []
        self.left: list[str] = []
        """What remains on the server, in words."""
        self._clients: list[RecordingClient] = []
        self._began = time.monotonic()
        self._sends = self._cuts = 0

    async def run(
        self, on_progress: Callable[[WorkloadProgress], None] = lambda progress: None
    ) -> None:
        """Run it.

        Raises ``holdfast.errors`` if the server is unusable; always cleans up.
        """
        try:
            for number in range(self._settings.chats):
                self.chats.append(await self._create(f"{self.name} {number + 1}"))
            async with self._online():
                await self._talk(on_progress)
                await self._settle(on_progress)
                for client, chat_id in (
                    (client, chat_id) for client in self._clients for chat_id in self.chats
                ):
                    client.note_copy(chat_id)
            for chat_id in self.chats:
                await self._note_chat(chat_id)
        finally:
            await self._clean_up()

    async def _create(self, name: str) -> str:
        owner, others = self._members[0], {account.user.user_id for account in self._members[1:]}
        members = sorted(others - {owner.user.user_id})
        body = {"kind": "group", "name": name, "members": members}
        created = await asyncio.to_thread(owner.rest.post, "/v1/chats", body=body)
        return str(created["chat"]["chat_id"])

    @asynccontextmanager
    async def _online(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for number in range(self._settings.devices):
                account = self._members[number % len(self._members)]
                device_id = f"verify-{account.user.user_id}-{number}"[:64]
                url = self._urls[number % len(self._urls)]
                client = RecordingClient(
                    url, account.token, self.record, account.user, device_id, settings=QUICK
                )
                self._clients.append(await stack.enter_async_context(client))
            listening = [asyncio.create_task(_keep(client)) for client in self._clients]
            try:
                await self._connected()
                yield
            finally:
                for task in listening:
                    task.cancel()
                await asyncio.gather(*listening, return_exceptions=True)

    async def _connected(self) -> None:
        try:
            async with asyncio.timeout(self._settings.settle_seconds):
                await asyncio.gather(*(client.connected() for client in self._clients))
        except TimeoutError:
            where = ", ".join(self._urls)
            raise Unavailable(f"not every device could connect to {where} in time") from None

    # The conversation

    async def _talk(self, on_progress: Callable[[WorkloadProgress], None]) -> None:
        """Send from all devices while connections break; try as a stranger."""
        until = time.monotonic() + self._settings.seconds
        async with asyncio.TaskGroup() as group:
            for number, client in enumerate(self._clients):
                group.create_task(self._send_messages(client, number, until))
            group.create_task(self._break_connections(until))
            group.create_task(self._probe_access(until))
            group.create_task(self._connect_twice())
            while time.monotonic() < until:
                on_progress(self._progress("talking"))
                await asyncio.sleep(0.2)

    async def _send_messages(self, client: RecordingClient, number: int, until: float) -> None:
        sent: list[tuple[str, str, str]] = []
        while time.monotonic() < until:
            if sent and self._rng.random() < _AGAIN:
                chat_id, content, key = self._rng.choice(sent)
            else:
                key = f"{number}-{len(sent)}"
                chat_id, content = self._rng.choice(self.chats), f"message {key} of {self.name}"
                sent.append((chat_id, content, key))
            self._sends += 1
            try:
                async with asyncio.timeout(self._settings.settle_seconds):
                    await client.send(chat_id, content, client_message_id=key)
            except TimeoutError:
                return  # the history has every try, and that none got a reply
            except HoldfastError:
                pass  # a refusal is a reply too
            await asyncio.sleep(self._rng.uniform(0, 2 / self._settings.sends_per_second))

    async def _break_connections(self, until: float) -> None:
        pause = self._settings.cut_every_seconds
        while time.monotonic() + pause < until:
            await asyncio.sleep(self._rng.uniform(pause / 2, pause))
            client, now = self._rng.choice(self._clients), time.monotonic()
            self._cuts += 1
            self.record.note(
                FaultWindow(
                    at=now, until=now, plane="connection", name="cut", clients=[client.device_id]
                )
            )
            client.cut()

    async def _connect_twice(self) -> None:
        """Connect one device twice, to another node if there is one: the server must
        say why it closes the first.
        """
        account, device_id = self._members[0], f"verify-{self._members[0].user.user_id}-twice"[:64]

        def client(name: str, url: str) -> RecordingClient:
            return RecordingClient(
                url,
                account.token,
                self.record,
                account.user,
                device_id,
                name=name,
                settings=QUICK,
            )

        async with client("the device at first", self._urls[0]) as first:
            closed = asyncio.create_task(_keep(first))
            await first.connected()
            async with client("the same device again", self._urls[-1]) as again:
                await again.connected()
                await asyncio.wait([closed], timeout=self._settings.settle_seconds)
        closed.cancel()
        await asyncio.gather(closed, return_exceptions=True)

    async def _probe_access(self, until: float) -> None:
        """Read as a member over REST, and read and write as a stranger."""
        readers = {"member over REST": self._members[0]}
        if self._stranger is not None:
            readers["stranger over REST"] = self._stranger
        for name, account in readers.items():
            user = account.user
            self.record.note(
                ClientSeen(client=name, tenant=user.tenant, user_id=user.user_id, device_id="")
            )
        while time.monotonic() < until:
            chat_id = self._rng.choice(self.chats)
            for name, account in readers.items():
                await self._read(name, account, chat_id)
            if self._stranger is not None:
                await self._intrude(self._stranger, chat_id)
            await asyncio.sleep(self._settings.seconds / 10)

    async def _read(self, name: str, account: Account, chat_id: str) -> None:
        op = self.record.invoke(
            time.monotonic(), name, "sync", chat_id, cursors={chat_id: Cursor(1, 0)}
        )
        try:
            page = await self._page(account, chat_id, 0)
        except HoldfastError as error:
            self._failed(op, error)
        else:
            self.record.note(Ok(at=time.monotonic(), op=op, pages=[page]))

    async def _intrude(self, stranger: Account, chat_id: str) -> None:
        key, content = f"intruder-{time.monotonic_ns()}", "nobody may read this"
        mark = digest(content, "text/plain")
        op = self.record.invoke(
            time.monotonic(), "stranger over REST", "send", chat_id, key=key, digest=mark
        )
        post = stranger.rest.post
        try:
            sent = await asyncio.to_thread(
                post, "/v1/chats", chat_id, "messages", body={"content": content}, key=key
            )
        except HoldfastError as error:
            self._failed(op, error)
        else:
            acked = Sighting(sent["sequence"], sent["message_id"])
            self.record.note(
                Ok(at=time.monotonic(), op=op, acked=acked, deduplicated=sent["deduplicated"])
            )

    def _failed(self, op: int, error: HoldfastError) -> None:
        at = time.monotonic()
        if error.outcome == "unknown":
            self.record.note(Unknown(at=at, op=op, reason="answered", code=error.code))
        else:
            self.record.note(Fail(at=at, op=op, code=error.code))

    # The end

    async def _settle(self, on_progress: Callable[[WorkloadProgress], None]) -> None:
        """Wait until all devices have all messages, or the time is up."""
        until = time.monotonic() + self._settings.settle_seconds
        while time.monotonic() < until:
            on_progress(self._progress("catching up"))
            heads = await asyncio.gather(
                *(self._page(self._members[0], chat_id, 0, 1) for chat_id in self.chats)
            )
            if all(
                len(client.copies.get(h.chat_id, ())) >= h.head
                for client in self._clients
                for h in heads
            ):
                return
            await asyncio.sleep(0.2)

    async def _note_chat(self, chat_id: str) -> None:
        """Record the whole chat, as its owner reads it."""
        messages: list[Sighting] = []
        page = await self._page(self._members[0], chat_id, 0)
        messages += page.messages
        while page.has_more:
            page = await self._page(self._members[0], chat_id, page.through)
            messages += page.messages
        account = self._members[0]
        users = dict.fromkeys(account.user.user_id for account in self._members)
        self.record.note(
            ChatAtEnd(
                at=time.monotonic(),
                chat_id=chat_id,
                tenant=account.user.tenant,
                epoch=page.epoch,
                counter=page.head,
                messages=messages,
                memberships=[MembershipSpan(0, user_id, True) for user_id in users],
            )
        )

    async def _page(
        self, account: Account, chat_id: str, after: int, limit: int = PAGE_MESSAGES
    ) -> PageSeen:
        answer = await asyncio.to_thread(
            account.rest.get, "/v1/chats", chat_id, "messages", after=after, limit=limit
        )
        found = [
            Sighting.of(message) for message in msgspec.convert(answer["messages"], list[Message])
        ]
        through = found[-1].sequence if found else after
        epoch, head = answer["epoch"], answer["head"]
        return PageSeen(
            chat_id, Cursor(epoch, after), epoch, found, through, answer["has_newer"], head, False
        )

    async def _clean_up(self) -> None:
        """Remove all members, the owner last, and the messages."""
        users = list(dict.fromkeys(account.user.user_id for account in self._members))
        rest = self._members[0].rest
        for number, chat_id in enumerate(self.chats, 1):
            remaining = "nobody is in it any more"
            try:
                for user_id in [*users[1:], users[0]]:
                    await asyncio.to_thread(rest.delete, "/v1/chats", chat_id, "members", user_id)
                if self._operator is not None:
                    await asyncio.to_thread(_delete_messages, self._operator, chat_id)
                    remaining = "an empty chat, without members and messages"
            except HoldfastError as error:
                remaining = f"not everything could be removed: {error.message}"
            self.left.append(f'{chat_id} "{self.name} {number}": {remaining}')

    def _progress(self, doing: str) -> WorkloadProgress:
        return WorkloadProgress(doing, time.monotonic() - self._began, self._sends, self._cuts)


def _delete_messages(operator: RestApi, chat_id: str) -> None:
    first = operator.get("/admin/chats", chat_id)["chat"]["head"] + 1
    body = {"first_sequence": first, "reason": "holdfast verify has ended"}
    for _ in range(DELETIONS_MAX):
        if (
            operator.post("/admin/chats", chat_id, "retain", body=body)["chat"]["first_sequence"]
            == first
        ):
            return
    raise Unavailable("deleting its messages takes too long")


async def _keep(client: RecordingClient) -> None:
    async for event in client.events():
        client.take(event)
