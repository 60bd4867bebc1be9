"""The screens of ``chat open``: a terminal with a prompt, or plain lines."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import termios
import threading
import tty
import unicodedata
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Protocol

from holdfast.cli.line_editor import Ended, Entered, LineEditor
from holdfast.cli.output import printable

LINES_WAITING_MAX = 100
"""Lines read ahead; at the bound reading stops, and no line is dropped."""
READ_BYTES_MAX = 4096
"""The most bytes, and so the most lines, of one read from a terminal."""
GROWING_LINES_MAX = 6
"""The lines of a growing reply that a terminal shows: the last ones."""
LOOK_SECONDS = 1.0
"""How often a line that waits for room checks that the loop still runs."""


class Screen(Protocol):
    """Where a ``TerminalChat`` reads lines and shows messages.

    ``is_pipe``: the input can wait for room, and its end does not mean that the user
    leaves.
    """

    is_pipe: bool

    def show(self, text: str) -> None:
        """Add a line."""
        ...

    def status(self, state: str, waiting: Sequence[str]) -> None:
        """Show the state of the connection, and the newest unacknowledged messages."""
        ...

    def growing(self, texts: Sequence[str]) -> None:
        """Show replies that are being written, until the next call."""
        ...

    def lines(self) -> AsyncIterator[str]:
        """The lines that the user enters, until the input ends."""
        ...

    def close(self) -> None: ...


class PlainScreen:
    """Pipes and files: messages on stdout, the state of the connection on stderr."""

    is_pipe = True

    def __init__(self) -> None:
        self._state = "connecting"
        self._loop = asyncio.get_running_loop()
        self._read: asyncio.Queue[str | None] = asyncio.Queue(LINES_WAITING_MAX)

    def show(self, text: str) -> None:
        print(text, flush=True)

    def status(self, state: str, waiting: Sequence[str]) -> None:
        if state != self._state:
            self._state = state
            print(f"-- {state}", file=sys.stderr, flush=True)

    def growing(self, texts: Sequence[str]) -> None:
        """A pipe gets whole messages only."""

    async def lines(self) -> AsyncIterator[str]:
        """Read in a daemon thread: asyncio cannot read files and /dev/null."""
        threading.Thread(target=self._read_input, daemon=True).start()
        while (line := await self._read.get()) is not None:
            yield line

    def close(self) -> None:
        pass

    def _read_input(self) -> None:
        try:
            for line in self._input():
                self._hand_over(line)
        except (RuntimeError, CancelledError):
            pass  # the loop has ended: nothing takes the remaining lines

    def _hand_over(self, line: str | None) -> None:
        """Wait for room. A loop that has just ended never completes the future."""
        putting = self._read.put(line)
        try:
            taken = asyncio.run_coroutine_threadsafe(putting, self._loop)
            while not self._loop.is_closed():
                with suppress(TimeoutError):
                    return taken.result(LOOK_SECONDS)
            raise CancelledError
        finally:
            putting.close()

    def _input(self) -> Iterator[str | None]:
        """The lines of the input; None marks its end."""
        # os.read, not sys.stdin: the interpreter would crash at exit if this thread
        # held stdin's lock.
        rest = b""
        while data := os.read(0, 65536):
            *whole, rest = (rest + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
        if rest:
            yield rest.decode(errors="replace")
        yield None


class TerminalScreen:
    """A terminal: growing replies, waiting messages and the prompt stay at its
    bottom.
    """

    is_pipe = False

    def __init__(self, name: str) -> None:
        self._name = name
        self._editor = LineEditor()
        self._state = "connecting"
        self._waiting: Sequence[str] = ()
        self._growing: Sequence[str] = ()
        self._drawn = 0
        self._entered: asyncio.Queue[str | None] = asyncio.Queue(LINES_WAITING_MAX + READ_BYTES_MAX)
        self._input = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._input)
        tty.setcbreak(self._input)
        mode = termios.tcgetattr(self._input)
        mode[3] &= ~termios.ISIG  # Ctrl+C is a key: the terminal must be restored first
        termios.tcsetattr(self._input, termios.TCSADRAIN, mode)
        self._read_on()
        self._draw()

    def show(self, text: str) -> None:
        self._erase()
        sys.stdout.write(text + "\n")
        self._draw()

    def status(self, state: str, waiting: Sequence[str]) -> None:
        if (state, list(waiting)) != (self._state, list(self._waiting)):
            self._state, self._waiting = state, list(waiting)
            self._erase()
            self._draw()

    def growing(self, texts: Sequence[str]) -> None:
        if list(texts) != list(self._growing):
            self._growing = list(texts)
            self._erase()
            self._draw()

    async def lines(self) -> AsyncIterator[str]:
        while (line := await self._entered.get()) is not None:
            if self._entered.qsize() == LINES_WAITING_MAX - 1:
                self._read_on()
            yield line

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._input)
        self._erase()
        sys.stdout.flush()
        termios.tcsetattr(self._input, termios.TCSADRAIN, self._before)

    def _typed(self) -> None:
        data = os.read(self._input, READ_BYTES_MAX)
        keys = self._editor.feed(data) if data else [Ended()]
        for key in keys:
            self._entered.put_nowait(key.text if isinstance(key, Entered) else None)
        if self._entered.qsize() >= LINES_WAITING_MAX:
            asyncio.get_running_loop().remove_reader(self._input)
        self._erase()
        self._draw()

    def _read_on(self) -> None:
        asyncio.get_running_loop().add_reader(self._input, self._typed)

    def _erase(self) -> None:
        """Erase the prompt and what is drawn above it."""
        up = f"\x1b[{self._drawn - 1}A" if self._drawn > 1 else ""
        sys.stdout.write(f"\r{up}\x1b[J" if self._drawn else "")
        self._drawn = 0

    def _draw(self) -> None:
        width = shutil.get_terminal_size().columns
        state = "" if self._state == "online" else f" ({self._state})"
        prompt = f"{self._name}{state}> {printable(self._editor.text)}"
        below = [_dim(line) for text in self._growing for line in _last_lines(text, width)]
        below += [_dim(f"… {_fit(printable(text), width - 3)}") for text in self._waiting]
        sys.stdout.write("\n".join([*below, _tail(prompt, width - 1)]))
        sys.stdout.flush()
        self._drawn = len(below) + 1


def _cells(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m"


def _last_lines(text: str, width: int) -> list[str]:
    """The end of a growing text, wrapped: what has scrolled away is not erased."""
    rest, lines = printable(text), []
    while len(head := _fit(rest, width - 1)) < len(rest):
        lines.append(head)
        rest = rest[len(head) :]
    return [*lines, rest][-GROWING_LINES_MAX:]


def _fit(text: str, width: int) -> str:
    """The beginning of ``text`` that fits into ``width`` cells."""
    used = 0
    for at, character in enumerate(text):
        used += _cells(character)
        if used > width:
            return text[:at]
    return text


def _tail(text: str, width: int) -> str:
    """The end of ``text`` that fits: a user sees the end of a long line."""
    return _fit(text[::-1], width)[::-1]


def at_a_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def screen_for(name: str) -> Screen:
    return TerminalScreen(name) if at_a_terminal() else PlainScreen()
