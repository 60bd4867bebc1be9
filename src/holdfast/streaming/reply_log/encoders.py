"""The encoders of the logs that a node writes. (Pure.)

They are a little state beside the log: which of its entries are templates. A log whose
encoder was dropped stores its next chunk whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast.streaming.entry_codec import END, Encoder
from holdfast.streaming.reply import EntryId
from holdfast.streaming.reply_log.contract import Appended, LogAppend

ENCODERS_MAX = 20_000


class EncodedAppend(NamedTuple):
    """An append as bytes, and the encoder to keep if the log takes it."""

    reply_id: str
    first: EntryId
    stored: Sequence[bytes]
    encoder: Encoder

    @property
    def last(self) -> EntryId:
        return EntryId(self.first.epoch, self.first.n + len(self.stored) - 1)

    @property
    def has_end(self) -> bool:
        return self.stored[-1][:1] == END


class LogEncoders:
    """One encoder for each log; the last used are kept."""

    def __init__(self, encoders_max: int = ENCODERS_MAX) -> None:
        self._encoders_max = encoders_max
        self._encoders: dict[str, tuple[int, Encoder]] = {}

    def encode(self, append: LogAppend) -> EncodedAppend:
        epoch, n = append.first
        of_epoch, encoder = self._encoders.get(append.reply_id, (epoch, None))
        trial = encoder.copy(n) if encoder is not None and of_epoch == epoch else Encoder()
        stored = [trial.encode(at, entry) for at, entry in enumerate(append.entries, n)]
        return EncodedAppend(append.reply_id, append.first, stored, trial)

    def answer(self, append: EncodedAppend, taken: bool, last: EntryId | None) -> Appended:
        """The answer to an append that the log took or not.

        Only what the log took is described by the encoder that goes on from there.
        """
        if not taken:
            return Appended(last)
        self._encoders.pop(append.reply_id, None)
        if not append.has_end:
            self._encoders[append.reply_id] = append.first.epoch, append.encoder
            if len(self._encoders) > self._encoders_max:
                del self._encoders[next(iter(self._encoders))]
        return Appended(last, sum(map(len, append.stored)))
