"""Proof: the rare moments that tests must have met."""

from __future__ import annotations

_reached: set[str] | None = None


def sometimes(name: str) -> None:
    """Mark a rare moment. It costs one comparison unless a test collects the marks."""
    if _reached is not None:
        _reached.add(name)


def collect_sometimes(into: set[str] | None) -> None:
    """Collect marks into this set from now on; None stops."""
    global _reached
    _reached = into
