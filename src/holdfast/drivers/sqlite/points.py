"""Named points at which a test may end the process.

``chats.commit.before``  all is written, nothing is durable: a kill loses the group
``chats.commit.after``   the group is durable but not answered: a kill loses the answer
``backup.…``             one file is copied; all are, before the folder gets its name
``restore.…``            one file is ready; all are; one is moved aside; one is in place

The first word of a commit's point is the database's name. A point costs one call; only
tests install a callback.
"""

from __future__ import annotations

from collections.abc import Callable


def _go_on(name: str) -> None:
    return


_reached: Callable[[str], None] = _go_on


def install(reached: Callable[[str], None] | None) -> None:
    """Call ``reached`` with the name of each point, on its thread; None removes it."""
    global _reached
    _reached = reached or _go_on


def checkpoint(name: str) -> None:
    """The calling thread is at this point now."""
    _reached(name)
