"""The commands in the guides."""

from __future__ import annotations

import re

from program import ROOT

GUIDES = ROOT / "docs" / "guides"
_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[str]:
    """Its blocks marked ``sh``."""
    return _BLOCK.findall((GUIDES / page).read_text())
