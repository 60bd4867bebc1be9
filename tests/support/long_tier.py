"""How often a proof is repeated: in full by ``make torture``, a tenth in ``make test``."""

from __future__ import annotations

import os

IS_LONG = os.environ.get("TORTURE", "") not in ("", "0")


def times(long: int) -> int:
    """This many in the long tier, else a tenth, rounded up."""
    return long if IS_LONG else -(-long // 10)
