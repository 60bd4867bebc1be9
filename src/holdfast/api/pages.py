"""Static pages: built once, compressed once, cached by the reader."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from holdfast.api.request import Request, Response

CACHE_SECONDS = 300
"""How long a reader may cache a page without asking again."""


LISTED_MAX = 32
"""Entries of a header's list that are examined; real clients send fewer."""
WEAK = "W/"


class _Made(NamedTuple):
    body: bytes
    compressed: bytes
    tag: str
    """Weak, because the plain and the compressed page share it."""


class StaticPage:
    """A page built on first use, on a thread, because building it would block the
    loop."""

    def __init__(
        self, media_type: str, make: Callable[[], bytes], headers: Mapping[str, str] | None = None
    ) -> None:
        self._media_type = media_type
        self._make = make
        self._headers = headers or {}
        self._made: _Made | None = None

    async def view(self, request: Request) -> Response:
        """The page, compressed if the reader accepts it; 304 if the reader has it."""
        made = self._made
        if made is None:
            made = await asyncio.to_thread(self._make_it)
        headers = {
            **self._headers,
            "Cache-Control": f"public, max-age={CACHE_SECONDS}",
            "ETag": made.tag,
            "Vary": "Accept-Encoding",
        }
        if _is_known(made.tag, request.header(b"if-none-match") or ""):
            return Response(304, media_type=self._media_type, headers=headers)
        if _takes_gzip(request.header(b"accept-encoding") or ""):
            headers["Content-Encoding"] = "gzip"
            return Response(200, made.compressed, self._media_type, headers)
        return Response(200, made.body, self._media_type, headers)

    def _make_it(self) -> _Made:
        body = self._make()
        tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        made = self._made = _Made(body, gzip.compress(body, mtime=0), WEAK + tag)
        return made


def _is_known(tag: str, if_none_match: str) -> bool:
    """Whether the reader has the page (RFC 9110, section 13.1.2: weak comparison)."""
    known = [each.strip().removeprefix(WEAK) for each in _listed(if_none_match)]
    return tag.removeprefix(WEAK) in known or known == ["*"]


def _takes_gzip(accept_encoding: str) -> bool:
    """Whether the reader accepts gzip (RFC 9110, section 12.5.3).

    A name beats ``*``.
    """
    taken: dict[str, bool] = {}
    for each in _listed(accept_encoding):
        coding, _, parameters = each.partition(";")
        name, _, weight = parameters.replace(" ", "").lower().partition("=")
        taken[coding.strip().lower()] = not (name == "q" and weight.strip("0.") == "")
    return taken.get("gzip", taken.get("*", False))


def _listed(header: str) -> list[str]:
    return header.split(",", LISTED_MAX)[:LISTED_MAX]
