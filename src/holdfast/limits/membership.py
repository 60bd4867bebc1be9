"""Among how many nodes limits are shared while the counters are away. (Pure.)"""

from __future__ import annotations


class Membership:
    """Live nodes as last known: more are believed at once, fewer only after no more were seen for a whole TTL.

    Counters that were restarted, emptied or away for long know nobody, and count up again as nodes announce
    themselves; within a TTL every node that lives has. So a node that died is counted for up to two TTLs.
    """

    def __init__(self, ttl_seconds: float, count: int = 1) -> None:
        """``count`` is what was known before."""
        self._ttl_seconds = ttl_seconds
        self.count = count
        self._most = 0
        """The most seen since ``_since``, all of them fewer than we count."""
        self._since = 0.0

    def seen(self, count: int, now: float) -> None:
        """So many were alive when we announced ourselves. ``now`` is in monotonic seconds."""
        if count >= self.count:
            self.count, self._most = count, 0
        elif not self._most:
            self._most, self._since = count, now
        else:
            self._most = max(self._most, count)
            if now - self._since >= self._ttl_seconds:
                self.count, self._most = self._most, 0

    def unseen(self) -> None:
        """Nobody answered: what was seen before proves nothing of what comes after."""
        self._most = 0
