"""Named points at which a test may end the process.

``chats.commit.before``  everything is written, nothing is durable: a kill here must lose the group and its answer
``chats.commit.after``   the group is durable, nobody knows yet: a kill here must lose only the answer
``backup.…``             a file is copied; everything is, but under its name
``restore.…``            a file is made ready; all are; one is moved aside; one is in place

The first part of a commit's is the file's name, for a node has several. They cost one call each.
Nothing but a test harness installs anything.
"""

from __future__ import annotations

from collections.abc import Callable


def _go_on(name: str) -> None:
    return


_reached: Callable[[str], None] = _go_on


def install(reached: Callable[[str], None] | None) -> None:
    """Call ``reached`` with the name of each point, on the thread that is there; None removes it."""
    global _reached
    _reached = reached or _go_on


def checkpoint(name: str) -> None:
    """The writer is at this point now."""
    _reached(name)
