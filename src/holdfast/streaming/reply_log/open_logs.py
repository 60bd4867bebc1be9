"""What a node knows of the logs that it writes. (Pure.)

It saves work and nothing depends on it: a log that is not known here stores its next
chunk whole, and where it ends is looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.streaming.entry_codec import END, Encoder
from holdfast.streaming.reply import EntryId
from holdfast.streaming.reply_log.contract import Appended, LogAppend

LOGS_MAX = 20_000


class _OpenLog(NamedTuple):
    """``entries_before``: in older epochs; -1 if that is not known."""

    epoch: int
    entries_before: int
    encoder: Encoder


class EncodedAppend(NamedTuple):
    """An append as bytes, and what is known of the log once it has them."""

    reply_id: str
    first: EntryId
    stored: Sequence[bytes]
    following: _OpenLog

    @property
    def last(self) -> EntryId:
        return EntryId(self.first.epoch, self.first.n + len(self.stored) - 1)

    @property
    def has_end(self) -> bool:
        return self.stored[-1][:1] == END


class OpenLogs:
    """The logs that this node writes; beyond ``logs_max`` the oldest are forgotten."""

    def __init__(self, logs_max: int = LOGS_MAX) -> None:
        self._logs_max = logs_max
        self._logs: dict[str, _OpenLog] = {}

    def begin(self, reply_id: str, epoch: int, entries_before: int) -> None:
        self._keep(reply_id, _OpenLog(epoch, entries_before, Encoder()))

    def encode(self, append: LogAppend) -> EncodedAppend:
        reply_id, first, entries = append
        log = self._logs.get(reply_id)
        if log is None or log.epoch != first.epoch:
            log = _OpenLog(first.epoch, -1, Encoder())
        stored, encoder = log.encoder.encode(first.n, entries)
        if encoder is not log.encoder:
            log = _OpenLog(log.epoch, log.entries_before, encoder)
        return EncodedAppend(reply_id, first, stored, log)

    def on_taken(self, append: EncodedAppend) -> Appended:
        """The log took the append: go on from there, unless that was the end."""
        if append.has_end:
            self._logs.pop(append.reply_id, None)
        elif self._logs.get(append.reply_id) is not append.following:
            self._keep(append.reply_id, append.following)
        return Appended(append.last, sum(map(len, append.stored)))

    def _keep(self, reply_id: str, log: _OpenLog) -> None:
        self._logs[reply_id] = log
        if len(self._logs) > self._logs_max:
            del self._logs[next(iter(self._logs))]
