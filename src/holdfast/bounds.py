"""What every part says of its bounds: sizes in words, and that a bound of nothing is refused."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB


def positive(owner: object, *names: str) -> None:
    """Refuse a setting that is zero or less: a bound of nothing would stop everything."""
    for name in names:
        value = getattr(owner, name)
        if value <= 0:
            raise ValueError(f"{name} must be greater than 0, not {value}")
