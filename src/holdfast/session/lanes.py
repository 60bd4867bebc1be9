"""What waits to be written to one connection. (Pure.)

Written in this order: control frames (answers, warnings, the closing: few), the page
(one at a time), then deliveries, then ephemeral frames, then growing replies. A page
comes before the deliveries because those of its chat that follow it were queued after
it; those queued before it are repeats that a client drops.

A ``resync`` stands among the deliveries, behind what was queued before it, so that a
client pulls from behind that and not from before it. There is at most one; it is
encoded when it is taken, with the newest heads.

Of a growing reply only the next entry is kept; its frame is encoded when it is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from holdfast.session.growing_reply import ENDED, GrowingReply
from holdfast.wire.codec import EncodedRun

NO_RESYNC = -1


class Lanes:
    """The outbound buffer. The bounds are the session's; here is only what is in it.

    ``mixed``: something else than deliveries waits. The usual case, in which nothing
    else does, must be fast.
    """

    __slots__ = (
        "bytes",
        "control",
        "control_bytes",
        "ephemeral",
        "ephemeral_bytes",
        "messages",
        "mixed",
        "page",
        "replies",
        "resync_after",
        "runs",
    )

    def __init__(self) -> None:
        self.control: list[bytes] = []
        self.control_bytes = 0
        self.page: bytes | None = None
        self.runs: list[EncodedRun] = []
        self.messages = 0
        self.bytes = 0
        self.mixed = False
        self.resync_after = NO_RESYNC
        self.ephemeral: dict[Hashable, bytes] | None = None
        self.ephemeral_bytes = 0
        self.replies: dict[GrowingReply, int] | None = None
        """The next entry that the client lacks of each."""

    @property
    def waiting_bytes(self) -> int:
        """Everything that waits, of all lanes."""
        return self.control_bytes + len(self.page or b"") + self.bytes + self.ephemeral_bytes

    def enqueue_control(self, frame: bytes) -> None:
        """Queue a control frame."""
        self.mixed = True
        self.control.append(frame)
        self.control_bytes += len(frame)

    def enqueue_page(self, page: bytes) -> None:
        """Queue a page; the last one must have been taken."""
        assert self.page is None, "one page at a time"
        self.mixed = True
        self.page = page

    def want_resync(self) -> None:
        """A resync goes out behind what is queued now, unless one is under way."""
        self.mixed = True
        if self.resync_after == NO_RESYNC:
            self.resync_after = len(self.runs)

    def enqueue_ephemeral(self, key: Hashable, frame: bytes, frames_max: int) -> None:
        """Queue the newest frame of its key; at the bound drop the oldest key."""
        self.mixed = True
        if self.ephemeral is None:
            self.ephemeral = {}
        self._forget(key)
        if len(self.ephemeral) >= frames_max:
            self._forget(next(iter(self.ephemeral)))
        self.ephemeral[key] = frame
        self.ephemeral_bytes += len(frame)

    def _forget(self, key: Hashable) -> None:
        if self.ephemeral and (old := self.ephemeral.pop(key, None)) is not None:
            self.ephemeral_bytes -= len(old)

    def add_reply(self, reply: GrowingReply, replies_max: int) -> None:
        """Send this reply from its beginning, unless it is being sent already; at the
        bound drop the oldest.
        """
        if self.replies is None:
            self.replies = {}
        if reply not in self.replies:
            if len(self.replies) >= replies_max:
                del self.replies[next(iter(self.replies))]
            self.replies[reply] = 0

    def drop_replies(self, chat_id: str) -> None:
        """The client is not in this chat any more: send nothing more of its replies."""
        if self.replies is not None:
            kept = {r: entry for r, entry in self.replies.items() if r.chat_id != chat_id}
            self.replies = kept or None

    def drop_all_but_control(self) -> None:
        self.replies = None
        self.page = None
        self.runs = []
        self.messages = self.bytes = 0
        self.resync_after = NO_RESYNC
        self.ephemeral = None
        self.ephemeral_bytes = 0

    def take(self, bytes_max: int, resync: Callable[[], list[bytes]]) -> list[bytes]:
        """Whole frames of about ``bytes_max`` in all, and at least one if there is any;
        they wait no longer.
        """
        if self.resync_after == NO_RESYNC and self.waiting_bytes <= bytes_max:
            frames = self._take_all()
            if self.replies is not None:
                self.mixed = self._take_replies(bytes_max - sum(map(len, frames)), frames)
            return frames
        frames = self._take_control(bytes_max)
        room = bytes_max - sum(map(len, frames))
        if self.page is not None and room > 0:
            frames.append(self.page)
            room -= len(self.page)
            self.page = None
        if room > 0:
            frames += self._take_runs(room, resync)
        if self.ephemeral and not self.runs and room > 0:
            frames += self.ephemeral.values()
            self.ephemeral = None
            self.ephemeral_bytes = 0
        replies_wait = False
        if self.replies is not None:
            room = 0 if self.runs else bytes_max - sum(map(len, frames))
            replies_wait = self._take_replies(room, frames)
        self.mixed = replies_wait or bool(
            self.control or self.page or self.ephemeral or self.resync_after != NO_RESYNC
        )
        return frames

    def _take_replies(self, bytes_max: int, frames: list[bytes]) -> bool:
        """Add the frames of replies that have grown; returns whether some must wait."""
        assert self.replies is not None
        for reply, entry in list(self.replies.items()):
            if reply.is_void:
                del self.replies[reply]
            elif entry < reply.published:
                if bytes_max <= 0:
                    return True
                frames.append(reply.frame(entry))
                bytes_max -= len(frames[-1])
                self.replies[reply] = reply.next_entry
                if reply.published == ENDED:
                    del self.replies[reply]
        self.replies = self.replies or None
        return False

    def _take_all(self) -> list[bytes]:
        """Everything: it fits, and no resync is to be put between."""
        frames, self.control = self.control, []
        if self.page is not None:
            frames.append(self.page)
            self.page = None
        frames += self.take_deliveries()
        if self.ephemeral:
            frames += self.ephemeral.values()
            self.ephemeral = None
        self.control_bytes = self.ephemeral_bytes = 0
        self.mixed = False
        return frames

    def take_deliveries(self) -> list[bytes]:
        """All deliveries, where nothing else waits."""
        runs = self.runs
        if not runs:
            return []
        self.runs = []
        self.messages = self.bytes = 0
        return [run.data for run in runs]

    def _take_control(self, bytes_max: int) -> list[bytes]:
        if self.control_bytes <= bytes_max:
            frames, self.control = self.control, []
            self.control_bytes = 0
            return frames
        frames, size = [], 0
        for frame in self.control:
            if size >= bytes_max:
                break
            frames.append(frame)
            size += len(frame)
        del self.control[: len(frames)]
        self.control_bytes -= size
        return frames

    def _take_runs(self, bytes_max: int, resync: Callable[[], list[bytes]]) -> list[bytes]:
        frames: list[bytes] = []
        size = taken = messages = 0
        while True:
            if taken == self.resync_after:
                frames += resync()
                self.resync_after = NO_RESYNC
            if taken == len(self.runs) or size >= bytes_max:
                break
            run = self.runs[taken]
            frames.append(run.data)
            size += run.size
            messages += run.count
            taken += 1
        del self.runs[:taken]
        self.messages -= messages
        self.bytes -= size
        if self.resync_after != NO_RESYNC:
            self.resync_after -= taken
        return frames
