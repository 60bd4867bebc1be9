"""Marks of rare moments, so that a test run can prove that it met them."""

from __future__ import annotations

from collections.abc import Callable

_reached: Callable[[str], None] | None = None


def sometimes(what: str, which: str = "") -> None:
    """Mark a rare moment; one call and one comparison unless marks are collected.

    ``which`` is one of a closed set, each a mark of its own:
    ``sometimes("a breaker was", "open")``.
    """
    if _reached is not None:
        _reached(f"{what}: {which}" if which else what)


def collect_sometimes(reached: Callable[[str], None] | None) -> None:
    """Call ``reached`` with each mark, on the thread that reaches it; None stops."""
    global _reached
    _reached = reached
