"""Receive a message from outside: stored once, handled once.

``received`` stores it in the caller's own transaction, with its source and its id there; a repetition is recognised for
seven days. Its handler's effects happen exactly once when they are in ``ctx.transaction()``; otherwise at least once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast.errors import InvalidMessage
from holdfast.work.job import JobDraft
from holdfast.work.outbox import enqueue


async def received(connection: Any, source: str, source_id: str, draft: JobDraft) -> bool:
    """Whether the message is new; it is stored with the transaction of ``connection``."""
    if not source or not source_id:
        raise InvalidMessage("a message from outside needs a source and its id there", field="source")
    (seq,) = await enqueue(connection, replace(draft, source=source, source_id=source_id))
    return seq != 0
