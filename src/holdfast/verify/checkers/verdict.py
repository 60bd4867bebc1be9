"""The result of a checker. (Pure.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise, and the events that show it."""

    what: str
    evidence: Sequence[object] = ()

    def __str__(self) -> str:
        return "\n    ".join([self.what, *map(str, self.evidence)])


@dataclass(slots=True)
class Verdict:
    """``examined`` counts facts; ``violations`` is empty if the promise is kept."""

    name: str
    examined: int = 0
    violations: list[Violation] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.violations

    def require(self, kept: bool, what: str, *evidence: object) -> None:
        """Count a fact, and a violation unless it is ``kept``."""
        self.examined += 1
        if not kept:
            self.violations.append(Violation(what, evidence))

    def __str__(self) -> str:
        head = f"{self.name}: {'kept' if self.ok else 'BROKEN'} ({self.examined} examined)"
        return "\n  ".join([head, *map(str, self.violations[:10])])
