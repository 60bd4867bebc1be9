"""Marks: named moments that a test can collect or act on.

Rare events, so that a proof can show that it met them
(``mark("a breaker was", "open")``), and the steps around which a crash matters:

``chats.commit.before``  all is written, nothing is durable: a kill loses the group
``chats.commit.after``   the group is durable but not answered: a kill loses the answer
``backup.…``             one file is copied; all are, before the folder gets its name
``restore.…``            one file is ready; all are; one is moved aside; one is in place

The first word of a commit's mark is the database's name. Without a listener a mark
costs one call and one comparison; only tests listen.
"""

from __future__ import annotations

from collections.abc import Callable

_Listener = Callable[[str], None]
_listeners: tuple[_Listener, ...] = ()


def mark(what: str, which: str = "") -> None:
    """The calling thread is at this moment now.

    ``which`` is one of a closed set, each a mark of its own.
    """
    if _listeners:
        name = f"{what}: {which}" if which else what
        for listener in _listeners:
            listener(name)


def on_mark(listener: _Listener) -> Callable[[], None]:
    """Call ``listener`` with each mark, on the thread that reaches it.

    Returns a function that ends this.
    """
    global _listeners
    _listeners = (*_listeners, listener)

    def stop() -> None:
        global _listeners
        _listeners = tuple(each for each in _listeners if each is not listener)

    return stop
