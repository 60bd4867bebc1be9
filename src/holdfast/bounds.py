"""What every part says of its bounds: sizes in words, and that a bound of nothing, or of no end, is refused. (Pure.)"""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


def positive(owner: object, *names: str) -> None:
    """Refuse a setting that is zero or less: a bound of nothing would stop everything."""
    for name in names:
        value = getattr(owner, name)
        if value <= 0:
            raise ValueError(f"{name} must be greater than 0, not {value}")


def at_most(owner: object, **most: float) -> None:
    """Refuse a setting that is more than can be meant: what is made for each of them would not end."""
    for name, limit in most.items():
        value = getattr(owner, name)
        if value > limit:
            raise ValueError(f"{name} must be at most {limit}, not {value}")
