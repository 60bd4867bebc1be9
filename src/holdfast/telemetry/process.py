"""The process: its own errors and how it is set."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.telemetry.logs import log
from holdfast.telemetry.metrics import counter, gauge

_defects = counter("defects", "Errors of our own, by part; each is in the log", ("part",))
_settings_changed = gauge("setting_changed", "1 for every setting that is not at its default", ("path",))


def defect(part: str, error: BaseException) -> None:
    """Something that must not happen did; the caller has limited the damage."""
    _defects.labels(part).inc()
    log.error("defect", part=part, exc_info=error)


def settings_changed(paths: Iterable[str]) -> None:
    """Labels are paths of settings, which are a closed set; values may be private and are not told."""
    _settings_changed.clear()
    for path in paths:
        _settings_changed.labels(path).set(1)
