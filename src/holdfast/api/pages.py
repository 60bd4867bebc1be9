"""What is the same for everybody until the next version: made once, compressed once, and cached by who reads it."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from holdfast.api.request import Request, Response

CACHE_SECONDS = 300
"""How long a reader need not ask again whether a page has changed."""


class _Made(NamedTuple):
    body: bytes
    compressed: bytes
    tag: str


class StaticPage:
    """A page that is made when it is first asked for, on a thread: making it takes longer than a turn of the loop."""

    def __init__(self, media_type: str, make: Callable[[], bytes], headers: Mapping[str, str] | None = None) -> None:
        self._media_type = media_type
        self._make = make
        self._headers = headers or {}
        self._made: _Made | None = None

    async def view(self, request: Request) -> Response:
        """The page, compressed where that is understood; 304 where the reader has it."""
        made = self._made
        if made is None:
            made = await asyncio.to_thread(self._make_it)
        headers = {
            **self._headers,
            "Cache-Control": f"public, max-age={CACHE_SECONDS}",
            "ETag": made.tag,
            "Vary": "Accept-Encoding",
        }
        if made.tag in (request.header(b"if-none-match") or ""):
            return Response(304, media_type=self._media_type, headers=headers)
        if "gzip" in (request.header(b"accept-encoding") or ""):
            headers["Content-Encoding"] = "gzip"
            return Response(200, made.compressed, self._media_type, headers)
        return Response(200, made.body, self._media_type, headers)

    def _make_it(self) -> _Made:
        body = self._make()
        tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        made = self._made = _Made(body, gzip.compress(body, mtime=0), tag)
        return made
