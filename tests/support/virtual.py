"""Virtual time for tests: the product's own loop, under a short name."""

from __future__ import annotations

from holdfast.verify.virtual import Deadlock, LoopClock, VirtualLoop, run

__all__ = ["Deadlock", "LoopClock", "VirtualLoop", "run"]
