"""Proof: the rare moments that tests must have met."""

from __future__ import annotations

from collections.abc import Callable

_reached: Callable[[str], None] | None = None


def sometimes(what: str, which: str = "") -> None:
    """Mark a rare moment. It costs one call and one comparison unless a proof collects the marks.

    ``which`` is one of a closed set and is told apart: ``sometimes("a breaker was", "open")``.
    """
    if _reached is not None:
        _reached(f"{what}: {which}" if which else what)


def collect_sometimes(reached: Callable[[str], None] | None) -> None:
    """Call ``reached`` with each mark from now on, on the thread that is there; None stops."""
    global _reached
    _reached = reached
