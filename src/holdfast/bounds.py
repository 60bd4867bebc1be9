"""Names for sizes, and checks of settings that are bounds. (Pure.)"""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def size_text(size: float) -> str:
    """A size for people: 100 GB, 9.0 GB, 1.2 MB."""
    unit, name = (1e9, "GB") if size >= 1e9 else (1e6, "MB")
    value = size / unit
    return f"{value:.0f} {name}" if value >= 10 or not value else f"{value:.1f} {name}"


def positive(owner: object, *names: str) -> None:
    """ValueError if a setting is zero or less: such a bound would stop everything."""
    for name in names:
        value = getattr(owner, name)
        if value <= 0:
            raise ValueError(f"{name} must be greater than 0, not {value}")


def at_most(owner: object, **most: float) -> None:
    """ValueError if a setting is above its limit: memory or work grows with it."""
    for name, limit in most.items():
        value = getattr(owner, name)
        if value > limit:
            raise ValueError(f"{name} must be at most {limit}, not {value}")
