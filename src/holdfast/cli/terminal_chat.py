"""``chat open``: one chat in the terminal, over any number of server restarts.

History comes once, over REST; from its end on the client follows. A terminal also opens
without a server: then it loads the history on the first connection and shows only newer
messages of the client. The user's own messages wait in the client's outbox file until
the server has them. They are shown when the server delivers them as the chat's, so each
line appears once. An assistant's reply is shown while it grows, until its message takes
its place.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from holdfast.cli.output import message_line
from holdfast.cli.rest import RestClient
from holdfast.cli.screen import Screen, at_a_terminal, screen_for
from holdfast.client import (
    ChatGone,
    ChatReset,
    Client,
    ClientEvent,
    ConnectionChanged,
    Message,
    ReplyProgress,
)
from holdfast.client.connection import claims_of
from holdfast.client.outbox import OutboxEntry
from holdfast.client.state import FileState
from holdfast.clock import Ids, SystemClock
from holdfast.errors import (
    HoldfastError,
    NotAMember,
    OperatorError,
    Refused,
    StateCorrupted,
    StateInUse,
)
from holdfast.message import Cursor

WINDOWS_MAX = 5
"""The most terminals of one user on one chat; a server allows as many devices."""
WAITING_MAX = 100
"""The most undelivered messages from a pipe; at the bound no further line is read.

A line typed at a terminal goes into the outbox at once: it survives leaving and a
crash.
"""
WAITING_SHOWN = 5
"""How many of the user's undelivered messages a terminal shows."""


@dataclass(frozen=True, slots=True)
class Room:
    """The chat to open. ``renewable``: ``token`` makes a new token at each call."""

    rest: RestClient
    token: Callable[[], str]
    renewable: bool
    chat_id: str
    history: int
    state_dir: Path
    as_json: bool

    def state_file(self, window: int) -> Path:
        """The state file of this server, user, chat and window."""
        claims = claims_of(self.token())
        identity = f"{self.rest.url}\0{claims.tenant}\0{claims.sub}\0{self.chat_id}".encode()
        name = hashlib.blake2b(identity, digest_size=8).hexdigest()
        return self.state_dir / "cli" / f"{name}-{window}.db"

    def page(self) -> dict[str, Any]:
        """The chat's last messages."""
        page: dict[str, Any] = self.rest.get(
            "/v1/chats", self.chat_id, "messages", limit=max(self.history, 1)
        )
        return page

    def client(self, window: int, start: Cursor | None) -> Client:
        return Client(
            self.rest.url,
            self._provide if self.renewable else self.token(),
            state=self.state_file(window),
            follow={self.chat_id},
            start={self.chat_id: start} if start is not None else None,
        )

    async def _provide(self) -> str:
        return self.token()


HOW_TO_LEAVE = "— /quit or Ctrl+D leaves, /help says more; what you write is sent with Enter —"
COMMANDS = """— /help   this
— /quit   leave, as Ctrl+D does; what is not sent yet is kept, and sent when you open the chat again
— //text  send a line that begins with /"""
ACCEPTED = ("syncing", "ready")
"""The states in which a message is sent at once."""


class TerminalChat:
    """One open chat: shows its messages and sends the user's lines."""

    def __init__(
        self, room: Room, screen: Screen, client: Client, unsent: list[OutboxEntry]
    ) -> None:
        self._room = room
        self._screen = screen
        self._client = client
        self._user = claims_of(room.token()).sub
        self._shown = 0
        self._has_history = False
        self._state = "connecting"
        self._waiting = {entry.client_message_id: entry.content for entry in unsent}
        self._growing: dict[str, str] = {}
        self._fewer = asyncio.Event()
        self._ids = Ids(SystemClock())

    def show(self, message: dict[str, Any]) -> None:
        if self._room.as_json:
            self._screen.show(msgspec.json.encode(message).decode())
            return
        own = message["sender_id"] == self._user and message["kind"] == "text"
        self._screen.show(message_line(message) + (" ✓" if own else ""))

    def begin(self, page: dict[str, Any]) -> None:
        """Show the history; a message below its end is not shown again."""
        self._has_history = True
        for message in page["messages"] if self._room.history else ():
            if message["sequence"] > self._shown:
                self.show(message)
        self._shown = max(self._shown, _end_of(page).sequence)

    async def receive(self) -> None:
        """Show the client's events as they arrive."""
        async for event in self._client.events():
            if (
                not self._has_history
                and isinstance(event, ConnectionChanged)
                and event.state in ACCEPTED
            ):
                await self._catch_up()
            self._on_event(event)

    async def _catch_up(self) -> None:
        """Load the missing history; after a failure the next connection tries again."""
        try:
            self.begin(await asyncio.to_thread(self._room.page))
        except HoldfastError as error:
            if not error.retryable:
                raise

    def _on_event(self, event: ClientEvent) -> None:
        match event:
            case Message():
                if event.sender_id == self._user and event.client_message_id:
                    self._on_delivered(event.client_message_id)
                self._replace(event.client_message_id or "")
                if event.sequence > self._shown:
                    self._shown = event.sequence
                    self.show(msgspec.to_builtins(event))
            case ConnectionChanged(state=state) if state in ACCEPTED:
                self._state = "online"
                self._update_status()
            case ConnectionChanged(state="backoff", reason=reason) if not self._state.startswith(
                "offline"
            ):
                # the first reason; each try after it fails with its own
                self._state = f"offline: {reason}"
                self._update_status()
            case ConnectionChanged(state="disconnected"):
                self._growing.clear()
                self._screen.growing(())
            case ReplyProgress(state="failed"):
                self._replace(event.reply_id)
                self._screen.show(f"— {event.sender_id} could not reply —")
            case ReplyProgress():
                self._growing[event.reply_id] = f"{event.sender_id}: {event.text}…"
                self._screen.growing(list(self._growing.values()))
            case ChatReset():
                self._shown = 0
                self._screen.show("— the chat was repaired; here it is again, from its beginning —")
            case ChatGone():
                raise NotAMember(
                    "you are not a member of this chat any more; ask an owner or admin of it to"
                    " add you"
                )
            case _:
                pass

    def _replace(self, reply_id: str) -> None:
        """A growing reply is a message now, or will be none."""
        if self._growing.pop(reply_id, None) is not None:
            self._screen.growing(list(self._growing.values()))

    async def send_lines(self) -> None:
        """Send the user's lines. At the end of a pipe, wait until all are delivered."""
        async with asyncio.TaskGroup() as sends:
            for key, content in self._waiting.items():
                sends.create_task(self._send(key, content))
            async for line in self._screen.lines():
                text = line if self._screen.is_pipe else self._run_command(line)
                if text.strip():
                    key = self._ids.new("cmsg_")
                    self._waiting[key] = text
                    self._update_status()
                    sends.create_task(self._send(key, text))
                    # let it reach the outbox before the input's end cancels it
                    await asyncio.sleep(0)
                if self._screen.is_pipe:
                    await self._until_fewer_than(WAITING_MAX)
            if self._screen.is_pipe:
                await self._until_fewer_than(1)
            else:
                raise _UserLeft

    def _run_command(self, line: str) -> str:
        """Run a command, or return the text to send.

        For terminals: a pipe has no commands.
        """
        if not line.startswith("/"):
            return line
        match line.split():
            case ["/help", *_]:
                self._screen.show(COMMANDS)
            case ["/quit" | "/exit", *_]:
                raise _UserLeft
            case _ if line.startswith("//"):
                return line[1:]
            case [word, *_]:
                self._screen.show(
                    f"— there is no command {word}: /help lists them; to send this line write"
                    f" /{line} —"
                )
        return ""

    async def _send(self, key: str, content: str) -> None:
        """Send; the message is shown on delivery, unless the history had it already."""
        try:
            sent = await self._client.send(self._room.chat_id, content, client_message_id=key)
        except HoldfastError as error:
            self._screen.show(f"not sent: {content} ({error})")
            self._on_delivered(key)
        else:
            if sent.sequence <= self._shown:
                self._on_delivered(key)

    def _on_delivered(self, key: str) -> None:
        self._waiting.pop(key, None)
        self._fewer.set()
        self._update_status()

    async def _until_fewer_than(self, count: int) -> None:
        while len(self._waiting) >= count:
            self._fewer.clear()
            await self._fewer.wait()

    def _update_status(self) -> None:
        newest = [*islice(reversed(self._waiting.values()), WAITING_SHOWN)]
        self._screen.status(self._state, newest[::-1])


class _UserLeft(Exception):
    """The user has left; unsent messages stay in the outbox."""


async def run_chat(room: Room) -> None:
    """Run until the user leaves; raise the reason if the server ends it for good."""
    page, problem = _history(room)
    async with _opened_client(room, None if page is None else _end_of(page)) as (client, unsent):
        screen = screen_for(claims_of(room.token()).sub)
        try:
            chat = TerminalChat(room, screen, client, unsent)
            if page is not None:
                chat.begin(page)
            else:
                screen.show(f"— {problem}; what you type is kept, and sent when it is back —")
            if not screen.is_pipe:
                screen.show(HOW_TO_LEAVE)
            await _until_one_ends(chat)
        finally:
            screen.close()
        if left := len(client.unsent()):
            print(
                f"{left} not sent yet: kept, and sent when you open this chat again",
                file=sys.stderr,
            )


def _history(room: Room) -> tuple[dict[str, Any] | None, str]:
    """The first page, or at a terminal the reason that there is none.

    A pipe fails at once.
    """
    try:
        return room.page(), ""
    except HoldfastError as error:
        if not error.retryable or not at_a_terminal():
            raise
        return None, str(error)


def _end_of(page: dict[str, Any]) -> Cursor:
    messages = page["messages"]
    return Cursor(page["epoch"], messages[-1]["sequence"] if messages else page["head"])


@asynccontextmanager
async def _opened_client(
    room: Room, start: Cursor | None
) -> AsyncIterator[tuple[Client, list[OutboxEntry]]]:
    """A client, and the messages that earlier windows left unsent.

    They are included even if they are sent by now, since they are not shown yet. On
    exit every shown message counts as seen.
    """
    window, client = await _free_window(room, start)
    unsent = client.unsent()
    try:
        for other in range(1, WINDOWS_MAX + 1):
            if other != window and room.state_file(other).exists():
                unsent += await _take_over(room.state_file(other), client)
        yield client, unsent
    finally:
        await client.__aexit__(None, None, None)


async def _free_window(room: Room, start: Cursor | None) -> tuple[int, Client]:
    """A client on the first free state file. ``_take_over`` reports a damaged one."""
    damaged: StateCorrupted | None = None
    for window in range(1, WINDOWS_MAX + 1):
        try:
            return window, await room.client(window, start).__aenter__()
        except StateInUse:
            pass
        except StateCorrupted as error:
            damaged = error
    raise damaged or StateInUse(
        f"this chat is open in {WINDOWS_MAX} terminals, as many as a server allows a user;"
        " close one"
    )


async def _take_over(file: Path, client: Client) -> list[OutboxEntry]:
    """Take over the unsent messages of a closed window; print the refused ones.

    Each message is on this client's disk before it is removed from the other file. If
    this process dies in between, both send it under the same id, and the server stores
    it once.
    """
    left = FileState(file)
    try:
        unsent = left.open(lambda entries, cursors, error: None).outbox
    except StateInUse:
        return []
    except OperatorError as error:
        print(f"-- {error}", file=sys.stderr)
        return []
    taken = []
    try:
        for entry in unsent:
            try:
                await client.post(
                    entry.chat_id, entry.content, entry.content_type, entry.client_message_id
                )
            except Refused as error:
                print(
                    f"-- not sent, and kept in {file}: {entry.content[:40]!r} ({error})",
                    file=sys.stderr,
                )
            else:
                left.remove(entry)
                taken.append(entry)
    except HoldfastError as error:
        print(f"-- what is unsent in {file} stays there: {error}", file=sys.stderr)
    finally:
        await left.close()
    return taken


async def _until_one_ends(chat: TerminalChat) -> None:
    """Receive and send until one of them ends; raise the error of either."""
    running = [asyncio.create_task(chat.receive()), asyncio.create_task(chat.send_lines())]
    try:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    for task in done:
        match task.exception():
            case None:
                pass
            case BaseExceptionGroup(exceptions=[_UserLeft()]) | _UserLeft():
                pass
            case error:
                raise error
