"""Server-sent events as bytes. (Pure.)

The rules come from what clients do with a stream, each seen with the real SDK:

- A comment is one line with ONE newline. An empty line behind it dispatches an event
  without data in openai-python once any event had an ``id:``, and that raises.
- ``id:`` only where the client resumes by it (native replies).
- No event but those a surface defines. A place in the queue is a comment there.
- A clean end without the surface's own end is silently accepted by most SDKs. So a
  failure is always an event, or the connection is aborted.
"""

from __future__ import annotations

import math

MEDIA_TYPE = "text/event-stream"
HEARTBEAT = b": hb\n"
"""Keeps proxies and clients from taking a quiet stream for a dead one."""
DONE = b"data: [DONE]\n\n"
"""The end of a chat completion that succeeded."""


def event(data: bytes, name: str = "", entry_id: str = "") -> bytes:
    """One event. ``data`` may have line breaks, ``name`` and ``entry_id`` may not."""
    if b"\n" in data or b"\r" in data:
        data = b"\ndata: ".join(data.splitlines())
    if not name and not entry_id:
        return b"data: %b\n\n" % data
    head = (f"event: {name}\n" if name else "") + (f"id: {entry_id}\n" if entry_id else "")
    return b"%bdata: %b\n\n" % (head.encode(), data)


def queued_comment(position: int, eta_seconds: float | None) -> bytes:
    """Where a request waits; ``eta_seconds`` None: nobody can say how long."""
    eta = "" if eta_seconds is None else f" eta={math.ceil(eta_seconds)}s"
    return f": queued position={position}{eta}\n".encode()
