"""libfaketime: a process whose wall clock we set; its monotonic clock stays."""

from __future__ import annotations

from pathlib import Path

from engines import library

PACKAGE = "libfaketime"


class WallClock:
    """The wall clock of the processes that are started with ``environment``; every
    change reaches them at once.
    """

    def __init__(self, directory: Path) -> None:
        # The variant for threads takes a lock around each question; a server asks from
        # several.
        self._library = library("**/faketime/libfaketimeMT.so.1", PACKAGE)
        self._file = directory / "wall-clock"
        self.set(0)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }

    def set(self, offset_seconds: int) -> None:
        """Set the offset from the machine's clock; atomically, for readers."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{offset_seconds:+d}s\n")
        new.replace(self._file)
