"""Which first bytes go past uvicorn: only those of which it would have said the same."""

from __future__ import annotations

from collections.abc import Iterator

import httptools
import pytest

from holdfast.node.http import asks_for_websocket

LINES = [
    b"GET /v1/ws HTTP/1.1",
    b"Host: localhost:8080",
    b"Upgrade: websocket",
    b"Connection: Upgrade",
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
    b"Sec-WebSocket-Version: 13",
    b"Authorization: Bearer a.b.c",
]


def head(*changes: tuple[int, bytes | None], more: bytes = b"") -> bytes:
    """The head of a request with some lines changed, or left out, and something behind it."""
    lines: list[bytes | None] = list(LINES)
    for place, line in changes:
        lines[place] = line
    return b"\r\n".join(line for line in lines if line is not None) + b"\r\n\r\n" + more


class Parsed:
    """What uvicorn's parser makes of a head, and its protocol of that."""

    def __init__(self, data: bytes) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.url = b""
        self.upgrades = False
        parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            named = {name.lower(): value for name, value in self.headers}
            options = [option.lower().strip() for option in named.get(b"connection", b"").split(b",")]
            self.upgrades = b"upgrade" in options and named.get(b"upgrade", b"").lower() == b"websocket"
        except httptools.HttpParserError:
            pass

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))


@pytest.mark.parametrize(
    "data",
    [
        head(),
        head((0, b"GET /v1/ws?device=1 HTTP/1.1")),
        head((2, b"upgrade:WebSocket")),
        head((3, b"connection: keep-alive, Upgrade")),
        head((3, b"Connection:\tupgrade \t")),
        head((6, None)),
    ],
)
def test_a_plain_request_for_a_websocket_is_known(data: bytes) -> None:
    assert asks_for_websocket(data) and Parsed(data).upgrades


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET",
        head()[:-1],
        head(more=b"\x81\x80AAAA"),
        head(more=head()),
        head((0, b"POST /v1/ws HTTP/1.1")),
        head((0, b"GET /v1/wsx HTTP/1.1")),
        head((0, b"GET /v1/ws HTTP/1.0")),
        head((0, b"GET /v1/ws\xff HTTP/1.1")),
        head((0, b"GET  /v1/ws HTTP/1.1")),
        head((2, b"Upgrade: h2c")),
        head((2, b"Upgrade: websocket, h2c")),
        head((2, None)),
        head((3, None)),
        head((3, b"Connection: close")),
        head((3, b"Connection: x-upgrade")),
        head((1, b"Connection: close")),
        head((1, b"Upgrade: h2c")),
        head((2, b"X-Upgrade: websocket")),
        head((1, b"Host : localhost")),
        head((1, b"Host: local\x00host")),
        head((1, b"Host: local\rhost")),
        head((1, b"Host: local\nUpgrade: websocket")),
        head((1, b" folded")),
        head((1, b"no colon")),
        head((1, b": no name")),
    ],
)
def test_everything_else_is_for_uvicorn_to_find_out(data: bytes) -> None:
    assert not asks_for_websocket(data)


def changed(data: bytes) -> Iterator[bytes]:
    """Every byte in turn left out, doubled, or another."""
    for place in range(len(data)):
        yield data[:place] + data[place + 1 :]
        yield data[:place] + data[place : place + 1] * 2 + data[place + 1 :]
        for other in b"\x00\t\n\r ,:;Aaz\x7f\x80\xff":
            yield data[:place] + bytes([other]) + data[place + 1 :]


def test_whatever_goes_past_uvicorn_it_would_have_handed_on_unchanged() -> None:
    known = 0
    for data in changed(head((3, b"connection: keep-alive, Upgrade"))):
        if asks_for_websocket(data):
            known += 1
            parsed = Parsed(data)
            assert parsed.upgrades, data
            first, *lines = data.split(b"\r\n")[:-2]
            assert first == b"GET %b HTTP/1.1" % parsed.url, data
            headers = [tuple(part.strip() for part in line.split(b":", 1)) for line in lines]
            assert headers == [(name, value.strip()) for name, value in parsed.headers], data
    assert known > 500
