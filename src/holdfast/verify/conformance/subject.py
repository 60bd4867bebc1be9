"""The client under test: a program in any language, and how it is driven.

A program reads commands from its standard input and writes events to its standard
output, one JSON object a line:

    in   {"do": "start", "url": …, "chat_id": …, "user_id": …, "state": …,
          "timings": {…}}
         {"do": "token", "token": …}
         {"do": "send", "client_message_id": …, "content": …}
         {"do": "stop"}
    out  {"event": "token_wanted"}
         {"event": "message", "epoch": …, "sequence": …, "content": …}
         {"event": "reset"}
         {"event": "sent", "client_message_id": …}
         {"event": "refused", "client_message_id": …, "code": …}
         {"event": "reply", "reply_id": …, "text": …, "state": …}
         {"event": "gone"}
         {"event": "stopped", "reason": …}
         {"event": "log", "text": …}

docs/guides/client-conformance.md says when each is due.
A scenario may kill the program and start it again on the same state file.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from holdfast.verify.scripted_server import CHAT, USER, ScriptedServer

STOP_SECONDS = 5.0
"""How long a program may take to end; then it is killed: a failure."""
LINE_BYTES_MAX = 1 << 20
LOG_LINES_MAX = 50
"""How much of a program's standard error and log events a report has."""


@dataclass(frozen=True, slots=True)
class Timings:
    """The client's timeouts, in milliseconds, to keep a run short.

    A client that ignores them only takes longer.
    """

    reconnect_initial_ms: int = 50
    reconnect_cap_ms: int = 200
    connect_timeout_ms: int = 1_000
    answer_timeout_ms: int = 2_000
    closing_timeout_ms: int = 1_000
    ack_interval_ms: int = 20


class Subject(Protocol):
    """The client under test.

    It follows CHAT, shows what it receives, and keeps its state over ``restart``.
    """

    received: list[tuple[int, int, str]]
    """(epoch, sequence, content) in the order shown; a reset empties it."""

    replies: list[tuple[str, str, str]]
    """(reply_id, text, state) of growing replies in the order shown; a client that does
    not show them leaves it empty.
    """

    outcomes: dict[str, str]
    """client_message_id -> "sent" or the error code it was refused with."""

    stopped: str | None
    """Why the client gave up for good, or None."""

    gone: bool
    """Whether the client reported that the user is no longer a member of CHAT."""

    def send(self, content: str, client_message_id: str) -> None: ...

    async def restart(self, hard: bool) -> None:
        """Restart the client on the same state; ``hard``: as if killed."""
        ...


class ProgramSubject:
    """A client behind a program that speaks JSON lines.

    Use it as ``async with ProgramSubject(…) as subject``.
    """

    def __init__(self, command: Sequence[str], server: ScriptedServer, state: Path) -> None:
        self.received: list[tuple[int, int, str]] = []
        self.replies: list[tuple[str, str, str]] = []
        self.outcomes: dict[str, str] = {}
        self.stopped: str | None = None
        self.gone = False
        self.log: deque[str] = deque(maxlen=LOG_LINES_MAX)
        self._command = command
        self._server = server
        self._state = state
        self._tokens = itertools.count(1)
        self._ending = False

    async def __aenter__(self) -> ProgramSubject:
        await self._start()
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await self._stop(hard=error is not None)

    def send(self, content: str, client_message_id: str) -> None:
        self._write_command(
            {"do": "send", "client_message_id": client_message_id, "content": content}
        )

    async def restart(self, hard: bool) -> None:
        await self._stop(hard)
        self.stopped = None
        await self._start()

    async def _start(self) -> None:
        self._ending = False
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            limit=LINE_BYTES_MAX,
            start_new_session=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._readers = [
            asyncio.create_task(self._read(self._process.stdout, self._on_line)),
            asyncio.create_task(self._read(self._process.stderr, self._on_log)),
        ]
        self._write_command(
            {
                "do": "start",
                "url": self._server.url,
                "chat_id": CHAT,
                "user_id": USER,
                "state": str(self._state),
                "timings": asdict(Timings()),
            }
        )

    async def _stop(self, hard: bool) -> None:
        self._ending = True
        if not hard and self._process.returncode is None:
            self._write_command({"do": "stop"})
            try:
                await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
            except TimeoutError:
                self._server.failure = f"the program did not end within {STOP_SECONDS:g} s of stop"
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        await self._process.wait()
        await asyncio.gather(*self._readers, return_exceptions=True)

    def _write_command(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(json.dumps(command).encode() + b"\n")

    async def _read(
        self, stream: asyncio.StreamReader, on_line: Callable[[bytes], Awaitable[None]]
    ) -> None:
        try:
            while line := await stream.readline():
                await on_line(line)
        except ValueError:  # a line above LINE_BYTES_MAX: the rest is unreadable
            await self._fail(f"the program wrote a line of more than {LINE_BYTES_MAX:,} bytes")
        if not self._ending:
            await self._fail(
                f"the program ended by itself, with exit code {await self._process.wait()}"
            )

    async def _fail(self, why: str) -> None:
        self._server.failure = self._server.failure or why
        await self._server.touch()

    async def _on_log(self, line: bytes) -> None:
        self.log.append(line.decode(errors="replace").rstrip())

    async def _on_line(self, line: bytes) -> None:
        try:
            self._on_event(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            shown = line[:200].decode(errors="replace").rstrip()
            await self._fail(
                f"the program wrote {shown!r}, which is no event: {type(error).__name__} {error}"
            )
        await self._server.touch()

    def _on_event(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "message":
                self.received.append(
                    (int(event["epoch"]), int(event["sequence"]), str(event["content"]))
                )
            case "reset":
                self.received.clear()
            case "sent":
                self.outcomes[event["client_message_id"]] = "sent"
            case "refused":
                self.outcomes[event["client_message_id"]] = str(event["code"])
            case "reply":
                self.replies.append(
                    (str(event["reply_id"]), str(event["text"]), str(event["state"]))
                )
            case "gone":
                self.gone = True
            case "stopped":
                self.stopped = str(event["reason"])
            case "token_wanted":
                self._write_command({"do": "token", "token": f"token-{next(self._tokens)}"})
            case "log":
                self.log.append(str(event["text"]))
            case other:
                raise ValueError(f"{other!r} is not one of its types")
