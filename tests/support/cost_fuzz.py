"""Random inputs for the cost table: what is expensive to read somewhere, in any field,
at any size up to its bound.

The same seed makes the same inputs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import log2
from typing import Any

import msgspec

HERE = "-here-"
STRINGS = (
    b"x",
    b"\xe2\x82\xac",
    b"\\u20ac",
    b"\\ud83d\\ude00",
    b"\\ud83d",
    b"\\n",
    b'\\"',
    b"%0a",
    b"a.",
    b"\xff",
    b"*:",
)
DIGITS = (b"9", b"0", b"-9", b"0.3", b"1e9", b"1.0E-9")
ELEMENTS = (
    b"1",
    b'""',
    b"{}",
    b"[]",
    b"null",
    b"true",
    b'"m123"',
    b"-1.5",
    b"[[]]",
    b'{"a":1}',
    b'["x",1]',
)
NESTS = ((b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]"), (b"[[],", b"]"))
HEADERS = (
    "Accept",
    "Accept-Encoding",
    "Content-Type",
    "Cookie",
    "Forwarded",
    "Idempotency-Key",
    "If-Match",
    "If-None-Match",
    "Origin",
    "Range",
    "User-Agent",
    "X-Act-As",
    "X-Device-ID",
    "X-Forwarded-Proto",
)
TEXTS = (
    "x",
    "%E2%82%AC",
    "%0a",
    "%",
    "+",
    "=",
    "&a=1",
    "&a",
    ";",
    ",",
    ", ",
    "*",
    "..",
    "//",
    "%00",
    '"',
    "W/",
    ";q=0.1,",
)


class Fuzz:
    """What one seed makes."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def body(self, valid: Any, bytes_max: int) -> bytes:
        """JSON of at most ``bytes_max``: ``valid`` with one large part."""
        path = self._random.choice(list(_places(valid)))
        encoded = msgspec.json.encode(_with(valid, path, HERE))
        head, _, tail = encoded.partition(msgspec.json.encode(HERE))
        room = max(self._size(bytes_max) - len(head) - len(tail), 16)
        return (head + self._value(_at(valid, path), room) + tail)[:bytes_max]

    def text(self, bytes_max: int) -> str:
        """For a query, a path or a header."""
        units = self._random.sample(TEXTS, self._random.randint(1, 3))
        size = self._size(bytes_max)
        return ("".join(units) * (size // len("".join(units)) + 1))[:size]

    def header(self, bytes_max: int) -> str:
        name = self._random.choice(HEADERS)
        return f"{name}: {self.text(bytes_max - len(name) - 2)}"

    def pieces(self, data: bytes, pieces_max: int) -> list[bytes]:
        """The same in a few pieces."""
        cuts = sorted(
            self._random.randrange(len(data) + 1) for _ in range(self._random.randrange(pieces_max))
        )
        return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    def _size(self, bytes_max: int) -> int:
        """The bound itself half of the time."""
        return (
            bytes_max
            if self._random.random() < 0.5
            else int(2 ** self._random.uniform(4, log2(bytes_max)))
        )

    def _value(self, valid: Any, size: int) -> bytes:
        """Instead of ``valid``: more of the same, or something else."""
        choose = self._random.choice
        same = msgspec.json.encode(valid)
        if isinstance(valid, (list, dict)) and len(same) > 2:
            same = choose(
                [
                    msgspec.json.encode(item)
                    for item in (valid if isinstance(valid, list) else valid.values())
                ]
            )
        unit, element = choose(STRINGS), choose([*ELEMENTS, same])
        before, behind = choose(NESTS)
        shapes = {
            "string": b'"' + unit * (size // len(unit)) + b'"',
            "number": (choose(DIGITS) * size)[:size],
            "digits": b"9" * size,
            "elements": b"[" + b",".join([element] * (size // (len(element) + 1))) + b"]",
            "names": b"{" + b",".join(self._names(size, element)) + b"}",
            "one name": b"{" + b",".join([b'"a":' + element] * (size // (len(element) + 5))) + b"}",
            "nested": before * (size // len(before + behind))
            + behind * (size // len(before + behind)),
            "open": before * (size // len(before)),
            "space": choose((b" ", b"\n\t")) * (size // 2) + same,
        }
        return shapes[choose(list(shapes))]

    @staticmethod
    def _names(size: int, element: bytes) -> Iterator[bytes]:
        for number in range(size // (len(element) + 10)):
            yield b'"k%d":' % number + element


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value; of a list its first two. Switches stay as they are:
    they choose what is asked.
    """
    if isinstance(value, bool):
        return
    yield path
    items = (
        enumerate(value[:2])
        if isinstance(value, list)
        else value.items()
        if isinstance(value, dict)
        else ()
    )
    for key, item in items:
        yield from _places(item, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _with(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        return other
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[path[0]] = _with(value[path[0]], path[1:], other)
    return changed
