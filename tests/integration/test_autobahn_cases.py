"""The cases of the Autobahn WebSocket test suite, by their numbers, against a real
server.

The suite itself runs on Python 2 only and expects an echo server. Ours answers requests
instead, so a case's message is a request here and its echo the answer. Where the suite
allows a range of behaviours we name the one we chose. Not here: 9 (performance:
messages above 64 KiB are refused, see 9.1.2 below) and 12, 13 (compression is never
agreed to: ``test_gateway_sockets.py::test_compression_is_not_agreed_to``).
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from sockets import running_node, token

from holdfast.node.node import Node

pytestmark = pytest.mark.real_time("uvloop")

TEXT, BINARY, CONTINUATION, CLOSE, PING, PONG = 0x1, 0x2, 0x0, 0x8, 0x9, 0xA
MASK = b"\x0a\x0b\x0c\x0d"
WAIT = b""
ANSWER, FAILS, THE_END = "answer", "fails", "the end"
"""Answered, or failed: a close frame that says so, and the end."""
FAILURE = 4501
"""Whatever it was; the library beneath us has no word of its own in it."""


def frame(opcode: int, payload: bytes = b"", *, fin: bool = True, rsv: int = 0) -> bytes:
    size = len(payload)
    if size < 126:
        length = bytes([0x80 | size])
    else:
        length = (
            b"\xfe" + size.to_bytes(2, "big") if size < 65536 else b"\xff" + size.to_bytes(8, "big")
        )
    masked = bytes(byte ^ MASK[index % 4] for index, byte in enumerate(payload))
    return bytes([(0x80 if fin else 0) | rsv << 4 | opcode]) + length + MASK + masked


def asking(word: str = "x", size: int = 0) -> bytes:
    """A request with this word; spaces fill it up to the size."""
    text = json.dumps(
        {"type": "resume", "request_id": "q", "payload": {"cursors": {}}, "note": word},
        ensure_ascii=False,
    )
    return text.encode().ljust(size)


def fragments(data: bytes, *sizes: int) -> list[bytes]:
    """A text message in fragments of these sizes and the rest."""
    cuts = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    parts = [data[a:b] for a, b in zip(cuts, [*cuts[1:], len(data)], strict=True)]
    last = len(parts) - 1
    return [frame(CONTINUATION if n else TEXT, part, fin=n == last) for n, part in enumerate(parts)]


def closing(code: int, reason: bytes = b"") -> bytes:
    return frame(CLOSE, code.to_bytes(2, "big") + reason)


def pong(payload: bytes = b"") -> bytes:
    return bytes([0x8A, len(payload)]) + payload


@dataclass(frozen=True)
class Case:
    """What is sent (``WAIT``: for an answer), and what must come back, in order;
    ``chop``: bytes written at a time.

    Bytes are expected as they stand. If nothing says that the connection ends, it must
    still answer a ping.
    """

    sent: Sequence[bytes]
    expected: Sequence[str | bytes]
    chop: int = 0


HELLO = asking()
HALF = len(HELLO) // 2
INVALID = b"\xce\xba\xe1\xbd\xb9\xcf\x83\xce\xbc\xce\xb5\xed\xa0\x80edited"
BAD_TEXT = b'{"type":"' + INVALID + b'"}'

FRAMING = {
    **{
        f"1.1.{n}": Case([frame(TEXT, asking(size=size))], [ANSWER])
        for n, size in enumerate((125, 126, 127, 128, 65535, 65536), 2)
    },
    "1.1.8": Case([frame(TEXT, asking(size=65536))], [ANSWER], chop=997),
    **{
        f"1.2.{n}": Case([frame(BINARY, b"\xfe" * size)], [FAILS])
        for n, size in enumerate((0, 125, 126, 65535), 1)
    },
    "9.1.2": Case([frame(TEXT, asking(size=65537))], [FAILS]),
}

PINGS = {
    "2.1": Case([frame(PING)], [pong()]),
    "2.2": Case([frame(PING, b"Hello, world!")], [pong(b"Hello, world!")]),
    "2.3": Case([frame(PING, bytes([0, 255, 254, 253]))], [pong(bytes([0, 255, 254, 253]))]),
    "2.4": Case([frame(PING, b"\xfe" * 125)], [pong(b"\xfe" * 125)]),
    "2.5": Case([frame(PING, b"\xfe" * 126)], [FAILS]),
    "2.6": Case([frame(PING, b"\xfe" * 125)], [pong(b"\xfe" * 125)], chop=1),
    "2.7": Case([frame(PONG)], []),
    "2.8": Case([frame(PONG, b"unsolicited")], []),
    "2.9": Case([frame(PONG, b"unsolicited"), frame(PING, b"ping")], [pong(b"ping")]),
    "2.10": Case([frame(PING, b"%d" % n) for n in range(10)], [pong(b"%d" % n) for n in range(10)]),
    "2.11": Case(
        [frame(PING, b"%d" % n) for n in range(10)], [pong(b"%d" % n) for n in range(10)], chop=1
    ),
}

RESERVED = {
    "3.1": Case([frame(TEXT, HELLO, rsv=1)], [FAILS]),
    "3.2": Case([frame(TEXT, HELLO), frame(TEXT, HELLO, rsv=2), frame(PING)], [FAILS]),
    "3.3": Case([frame(TEXT, HELLO), frame(TEXT, HELLO, rsv=3), frame(PING)], [FAILS]),
    "3.4": Case([frame(TEXT, HELLO), frame(TEXT, HELLO, rsv=4), frame(PING)], [FAILS], chop=1),
    "3.5": Case([frame(BINARY, b"\xff", rsv=5)], [FAILS]),
    "3.6": Case([frame(PING, rsv=6)], [FAILS]),
    "3.7": Case([frame(CLOSE, rsv=7)], [FAILS]),
}

OPCODES = {
    **{
        f"4.1.{n}": Case([frame(opcode, b"x" * (n % 2))], [FAILS])
        for n, opcode in enumerate((3, 4, 5, 6, 7), 1)
    },
    **{
        f"4.2.{n}": Case([frame(opcode, b"x" * (n % 2))], [FAILS])
        for n, opcode in enumerate((11, 12, 13, 14, 15), 1)
    },
}

BEGUN, ENDED = fragments(HELLO, HALF)
FRAGMENTS = {
    "5.1": Case([frame(PING, b"a", fin=False), frame(CONTINUATION, b"b")], [FAILS]),
    "5.2": Case([frame(PONG, b"a", fin=False), frame(CONTINUATION, b"b")], [FAILS]),
    "5.3": Case([BEGUN, ENDED], [ANSWER]),
    "5.5": Case([BEGUN, ENDED], [ANSWER], chop=1),
    "5.6": Case([BEGUN, frame(PING, b"between"), ENDED], [pong(b"between"), ANSWER]),
    "5.8": Case([BEGUN, frame(PING, b"between"), ENDED], [pong(b"between"), ANSWER], chop=1),
    "5.9": Case([frame(CONTINUATION, HELLO), frame(TEXT, HELLO)], [FAILS]),
    "5.11": Case([frame(CONTINUATION, HELLO), frame(TEXT, HELLO)], [FAILS], chop=1),
    "5.12": Case([frame(CONTINUATION, HELLO, fin=False), frame(TEXT, HELLO)], [FAILS]),
    "5.15": Case([BEGUN, ENDED, frame(CONTINUATION, b"x", fin=False), frame(TEXT, HELLO)], [FAILS]),
    "5.18": Case([BEGUN, frame(TEXT, HELLO)], [FAILS]),
    "5.19": Case(
        [
            *fragments(HELLO, 5, 5)[:2],
            frame(PING, b"1"),
            frame(CONTINUATION, HELLO[10:15], fin=False),
            frame(PING, b"2"),
            frame(CONTINUATION, HELLO[15:]),
        ],
        [pong(b"1"), pong(b"2"), ANSWER],
    ),
    "5.20": Case(
        [
            *fragments(HELLO, 5, 5)[:2],
            frame(PING, b"1"),
            frame(CONTINUATION, HELLO[10:15], fin=False),
            frame(PING, b"2"),
            frame(CONTINUATION, HELLO[15:]),
        ],
        [pong(b"1"), pong(b"2"), ANSWER],
        chop=1,
    ),
    "10.1.1": Case(fragments(asking(size=19_500), *[1300] * 14), [ANSWER]),
}

WORDS = {
    "6.2.1": "Hello-µ@ßöäüàá-UTF-8!!",
    "6.5.1": "κόσμε",
    "6.6.11": "κόσμε",
    "6.7.1": "\\u0000",
    "6.7.3": "ࠀ",
    "6.7.4": "\U00010000",
    "6.9.1": "\x7f",
    "6.9.2": "߿",
    "6.9.3": "\uffff",
    "6.9.4": "\U0010ffff",
    "6.11.3": "\ufffd",
    "6.22.1": "\ufffe",
    "6.23.1": "\ufdd0",
}
BROKEN_UTF8 = {
    "6.3.1": INVALID,
    "6.4.1": b"\xce\xba\xe1\xbd\xb9\xcf\x83\xce\xbc\xce\xb5\xf4\x90\x80\x80edited",
    "6.6.1": b"\xce",
    "6.6.3": b"\xce\xba\xe1",
    "6.8.1": b"\xf8\x88\x80\x80\x80",
    "6.8.2": b"\xfc\x84\x80\x80\x80\x80",
    "6.10.1": b"\xf7\xbf\xbf\xbf",
    "6.10.2": b"\xfb\xbf\xbf\xbf\xbf",
    "6.11.5": b"\xf4\x90\x80\x80",
    "6.12.1": b"\x80",
    "6.12.2": b"\xbf",
    "6.12.8": bytes(range(0x80, 0xC0)),
    "6.13.1": b"\xc0 \xc1 \xdf ",
    "6.14.1": b"\xc0",
    "6.14.3": b"\xf0\x80\x80",
    "6.15.1": b"\xc0\xe0\x80\xf0\x80\x80",
    "6.16.1": b"\xfe",
    "6.16.2": b"\xff",
    "6.17.1": b"\xc0\xaf",
    "6.17.3": b"\xf0\x80\x80\xaf",
    "6.18.1": b"\xc1\xbf",
    "6.19.1": b"\xc0\x80",
    "6.20.1": b"\xed\xa0\x80",
    "6.20.7": b"\xed\xbf\xbf",
    "6.21.1": b"\xed\xa0\x80\xed\xb0\x80",
}
UTF8 = {
    **{number: Case([frame(TEXT, asking(word))], [ANSWER]) for number, word in WORDS.items()},
    "6.2.2": Case(fragments(asking(WORDS["6.2.1"]), 70, 5), [ANSWER]),
    "6.2.3": Case(fragments(asking("µß"), *[12] * 6), [ANSWER]),
    "6.2.4": Case(fragments(asking("κόσμε"), *[11] * 7), [ANSWER], chop=1),
    **{
        number: Case([frame(TEXT, b'{"type":"' + bad + b'"}')], [FAILS])
        for number, bad in BROKEN_UTF8.items()
    },
    "6.3.2": Case(fragments(BAD_TEXT, *[3] * 8), [FAILS]),
}

CLOSES = {
    "7.1.1": Case([frame(TEXT, HELLO), WAIT, closing(1000)], [ANSWER, b"\x88\x02\x03\xe8"]),
    "7.1.2": Case([closing(1000), closing(1000)], [b"\x88\x02\x03\xe8"]),
    "7.1.2 without a code": Case([frame(CLOSE), closing(1000)], [b"\x88\x00"]),
    "7.1.2 with a reason": Case([closing(1000, b"bye"), closing(1001)], [b"\x88\x05\x03\xe8bye"]),
    "7.1.2 with a bad code": Case([closing(5000), closing(1000)], [FAILS]),
    "7.1.3": Case([closing(1000), frame(PING)], [b"\x88\x02\x03\xe8"]),
    "7.1.4": Case([closing(1000), frame(TEXT, HELLO)], [b"\x88\x02\x03\xe8"]),
    "7.1.5": Case([BEGUN, closing(1000), ENDED], [b"\x88\x02\x03\xe8"]),
    "7.3.1": Case([frame(CLOSE)], [b"\x88\x00"]),
    "7.3.2": Case([frame(CLOSE, b"a")], [FAILS]),
    "7.3.3": Case([closing(1000)], [b"\x88\x02\x03\xe8"]),
    "7.3.4": Case([closing(1000, b"Hello")], [b"\x88\x07\x03\xe8Hello"]),
    "7.3.5": Case([closing(1000, b"*" * 123)], [b"\x88\x7d\x03\xe8" + b"*" * 123]),
    "7.3.6": Case([closing(1000, b"*" * 124)], [FAILS]),
    "7.5.1": Case([closing(1000, INVALID)], [FAILS]),
    **{
        f"7.7.{n}": Case([closing(code)], [b"\x88\x02" + code.to_bytes(2, "big")])
        for n, code in enumerate(
            (1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 3000, 3999, 4000, 4999), 1
        )
    },
    **{
        f"7.9.{n}": Case([closing(code)], [FAILS])
        for n, code in enumerate((0, 999, 1004, 1005, 1006, 1016, 1100, 2000, 2999), 1)
    },
    **{f"7.13.{n}": Case([closing(code)], [FAILS]) for n, code in enumerate((5000, 65535), 1)},
}

CASES = {**FRAMING, **PINGS, **RESERVED, **OPCODES, **FRAGMENTS, **UTF8, **CLOSES}


class Peer(asyncio.Protocol):
    """Reads what came before a reset; a StreamReader reports the reset alone."""

    def __init__(self) -> None:
        self._came = bytearray()
        self._ended = False
        self._changed = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._came += data
        self._changed.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._ended = True
        self._changed.set()

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        self._transport.close()

    async def until(self, mark: bytes) -> bytes:
        while mark not in self._came:
            await self._more()
        return self._take(self._came.index(mark) + len(mark))

    async def exactly(self, size: int) -> bytes:
        while len(self._came) < size:
            await self._more()
        return self._take(size)

    async def _more(self) -> None:
        if self._ended:
            raise EOFError
        self._changed.clear()
        await self._changed.wait()

    def _take(self, size: int) -> bytes:
        taken = bytes(self._came[:size])
        del self._came[:size]
        return taken


async def played(node: Node, case: Case, user: str) -> list[str | bytes]:
    """What came back, in order; pushes and our own farewell are passed over."""
    loop = asyncio.get_running_loop()
    _, peer = await loop.create_connection(Peer, "127.0.0.1", node.settings.server.port)
    head = (
        "GET /v1/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection:"
        " Upgrade\r\nSec-WebSocket-Key:"
        f" {base64.b64encode(os.urandom(16)).decode()}\r\nSec-WebSocket-Version:"
        f" 13\r\nAuthorization: Bearer {token(node, user)}\r\n\r\n"
    )
    peer.write(head.encode())
    assert (await peer.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
    came: list[str | bytes] = []
    try:
        for data in case.sent:
            while data == WAIT and ANSWER not in came:
                came += await _next(peer)
            await _write(peer, data, case.chop or max(len(data), 1))
        while _ends(case.expected) or len(came) < len(case.expected):
            came += await _next(peer)
        peer.write(frame(PING, b"still there?"))
        while came[-1:] != [pong(b"still there?")]:
            came += await _next(peer)
        came.pop()
    except EOFError:
        came.append(THE_END)
    peer.close()
    return came


async def _write(peer: Peer, data: bytes, chop: int) -> None:
    for start in range(0, len(data), chop):
        peer.write(data[start : start + chop])
        await asyncio.sleep(0)


def _ends(expected: Sequence[str | bytes]) -> bool:
    return any(each == FAILS or (isinstance(each, bytes) and each[0] == 0x88) for each in expected)


async def _next(peer: Peer) -> list[str | bytes]:
    first, size = await peer.exactly(2)
    extra = b""
    if size >= 126:
        extra = await peer.exactly(2 if size == 126 else 8)
    payload = await peer.exactly(int.from_bytes(extra, "big") if extra else size)
    if first & 0x0F != TEXT:
        failed = (
            first == 0x88 and int.from_bytes(payload[:2], "big") == FAILURE and len(payload) > 2
        )
        return [FAILS if failed else bytes([first, size]) + payload]
    return [ANSWER] if json.loads(payload).get("request_id") == "q" else []


def in_one_piece(case: Case) -> Case:
    """The same in as few writes as possible: it must change nothing."""
    runs = (
        b"".join(run) for waits, run in groupby(case.sent, lambda data: data == WAIT) if not waits
    )
    return replace(case, sent=[piece for run in runs for piece in (WAIT, run)][1:], chop=0)


def frame_by_frame(case: Case) -> Case:
    return case


@pytest.mark.parametrize("delivered", [frame_by_frame, in_one_piece])
async def test_every_case_of_the_suite_ends_as_it_says(
    tmp_path: Path, delivered: Callable[[Case], Case]
) -> None:
    wrong: dict[str, tuple[object, object]] = {}

    async with running_node(tmp_path) as node:
        for index, (number, each) in enumerate(CASES.items()):
            case = delivered(each)
            async with asyncio.timeout(30):
                came = await played(node, case, f"user-{index}")
            if FAILS in case.expected:
                # what was answered before is not judged
                came = [each for each in came if each in (FAILS, THE_END)]
            expected = [*case.expected, *([THE_END] if _ends(case.expected) else [])]
            # bytes that nobody reads reset a connection
            cut = case.chop and FAILS in expected and came == [THE_END]
            if came != expected and not cut:
                wrong[number] = (came, expected)

    assert not wrong, "\n".join(f"{number}: {came}" for number, came in wrong.items())
    assert len(CASES) > 120


@pytest.mark.parametrize("section", ["1", "2", "3", "4", "5", "6", "7"])
def test_every_section_of_the_suite_that_concerns_us_is_there(section: str) -> None:
    assert sum(number.startswith(f"{section}.") for number in CASES) >= 7
