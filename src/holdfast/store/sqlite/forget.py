"""What is forgotten with time, and what is forgotten of a person."""

from __future__ import annotations

from holdfast.message import User
from holdfast.store.sqlite.append import WriteResult
from holdfast.store.sqlite.database import SQL, Handle


def forget_keys(handle: Handle, answers_before: str, sends_before: str, limit: int) -> WriteResult[int]:
    """Forget idempotency keys that are too old, at most ``limit`` of answers and ``limit`` of messages."""
    with handle.transaction() as connection:
        connection.execute(SQL["forget_answers"], {"before": answers_before, "limit": limit})
        forgotten = connection.changes()
        through = connection.execute(SQL["old_keys"], {"before": sends_before, "limit": limit}).get
        if through is not None:
            connection.execute(SQL["forget_keys"], {"through": through})
            forgotten += connection.changes()
            connection.execute(SQL["keys_forgotten"], {"through": through})
    return WriteResult(forgotten)


def forget_user(handle: Handle, user: User) -> WriteResult[None]:
    """Forget a user's devices and the answers kept for their keys."""
    with handle.transaction() as connection:
        connection.execute(SQL["forget_devices_of"], user._asdict())
        connection.execute(SQL["forget_answers_of"], user._asdict())
    return WriteResult(None, forgets=True)
