"""One AI reply, asked for and read as events, across dropped connections."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from holdfast.cli.rest import RestClient
from holdfast.errors import HoldfastError, OutcomeUnknown, Unavailable

RECONNECT_SECONDS = 30.0
"""How long a dropped reply is tried again: it runs on for as long without a reader."""
RECONNECT_PAUSE_SECONDS = 0.5
START_TRIES = 4
ENDS = ("done", "failed")


class ReplyEvent(NamedTuple):
    """``queued``, ``delta``, ``usage``, ``failed`` or ``done``, with its data; or
    ``dropped``, when the connection has to be opened again.
    """

    name: str
    data: Mapping[str, Any]
    id: str = ""


def parse_events(chunks: Iterable[bytes]) -> Iterator[ReplyEvent]:
    """The server-sent events in these bytes, however they are cut."""
    rest = b""
    for chunk in chunks:
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            fields = dict(
                line.split(": ", 1) for line in event.decode().split("\n") if ": " in line[1:]
            )
            if "data" in fields:
                name = fields.get("event", "message")
                yield ReplyEvent(name, msgspec.json.decode(fields["data"]), fields.get("id", ""))


class AskedReply:
    """A reply that this command began."""

    def __init__(self, rest: RestClient, reply_id: str) -> None:
        self._rest = rest
        self.reply_id = reply_id
        self._path = f"/v1/replies/{quote(reply_id, safe='')}"
        self._last_id = ""
        self.ended = False

    @classmethod
    def start(cls, rest: RestClient, body: Mapping[str, Any], key: str) -> AskedReply:
        """Ask for a reply. Repeated under its key while the outcome is unknown."""
        for attempt in range(1, START_TRIES + 1):
            try:
                return cls(rest, rest.post("/v1/replies", body=body, key=key)["id"])
            except OutcomeUnknown:
                if attempt == START_TRIES:
                    raise
                time.sleep(RECONNECT_PAUSE_SECONDS * attempt)
        raise AssertionError("unreachable")

    def events(self) -> Iterator[ReplyEvent]:
        """Its events up to the end; after a dropped connection those that follow.

        Raises the last error if it cannot be read again in time.
        """
        give_up_at = 0.0
        while not self.ended:
            try:
                for event in self._read():
                    give_up_at = 0.0
                    self._last_id = event.id or self._last_id
                    self.ended = event.name in ENDS
                    yield event
                if self.ended:
                    return
                raise Unavailable("the connection was closed before the reply's end")
            except (Unavailable, OutcomeUnknown) as error:
                now = time.monotonic()
                give_up_at = give_up_at or now + RECONNECT_SECONDS
                if now >= give_up_at:
                    raise
                yield ReplyEvent("dropped", {"message": error.message})
                time.sleep(error.retry_after_seconds or RECONNECT_PAUSE_SECONDS)

    def _read(self) -> Iterator[ReplyEvent]:
        headers = {"Accept": "text/event-stream"}
        if self._last_id:
            headers["Last-Event-ID"] = self._last_id
        with self._rest.open("GET", f"{self._path}/events", headers=headers) as response:
            if response.status == 204:  # nothing comes after what we have
                self.ended = True
                return
            yield from parse_events(iter(lambda: response.read1(65_536), b""))

    def cancel(self) -> None:
        """Cancel it unless it has ended; a failure to do so changes nothing here."""
        if not self.ended:
            try:
                self._rest.delete(self._path)
            except HoldfastError:
                return
