"""Among which nodes limits are shared while the counters are away. (Pure.)"""

from __future__ import annotations

from collections.abc import Iterable


class NodeMembership:
    """Live nodes as last known: more are believed at once, fewer only after no more were seen for a whole TTL.

    Counters that were restarted, emptied or away for long know nobody, and count up again as nodes announce
    themselves; within a TTL every node that lives has. So a node that died is counted for up to two TTLs.
    """

    def __init__(self, ttl_seconds: float, node: str, count: int = 1, names: Iterable[str] = ()) -> None:
        """``node`` is this one; ``count`` and ``names`` are what was known before."""
        self._ttl_seconds = ttl_seconds
        self._count = count
        self._most = 0
        """The most seen since ``_since``, all of them fewer than we count."""
        self._since = 0.0
        self._missing_since: dict[str, float | None] = dict.fromkeys((*names, node))
        """By name; None: seen when the counters last answered."""

    @property
    def count(self) -> int:
        return max(self._count, len(self._missing_since))

    @property
    def names(self) -> tuple[str, ...]:
        """Of all of them, in order; none if not all are known."""
        return tuple(sorted(self._missing_since)) if len(self._missing_since) == self.count else ()

    def seen(self, count: int, names: Iterable[str], now: float) -> None:
        """So many were alive when we announced ourselves, and these. ``now`` is in monotonic seconds."""
        self._see_names(set(names), now)
        if count >= self._count:
            self._count, self._most = count, 0
        elif not self._most:
            self._most, self._since = count, now
        else:
            self._most = max(self._most, count)
            if now - self._since >= self._ttl_seconds:
                self._count, self._most = self._most, 0

    def _see_names(self, alive: set[str], now: float) -> None:
        missing = {name: since if since is not None else now for name, since in self._missing_since.items()}
        gone = {name for name, since in missing.items() if now - since >= self._ttl_seconds}
        kept = {name: since for name, since in missing.items() if name not in alive | gone}
        self._missing_since = {**kept, **dict.fromkeys(alive)}

    def unseen(self) -> None:
        """Nobody answered: what was seen before proves nothing of what comes after."""
        self._most = 0
        self._missing_since = dict.fromkeys(self._missing_since)
