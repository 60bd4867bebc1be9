"""Tells listeners that a SEV-1 was counted, so that the judge of alerts need not wait
for its next turn: a process that dies in between could not report it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_Listener = Callable[[], None]
_listeners: tuple[_Listener, ...] = ()


def urgent() -> None:
    """Messages are at risk; the metric that says so has been counted. Any thread."""
    for listener in _listeners:
        listener()


@contextmanager
def on_urgent(listener: _Listener) -> Iterator[None]:
    """Call ``listener`` each time while the block runs, on whatever thread it is."""
    global _listeners
    _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        _listeners = tuple(each for each in _listeners if each is not listener)
