"""What a worker holds in memory, and which job may start now. (Pure.)

Jobs of a stream start in sequence order, one after another; streams run side by side. A job behind a block goes back
to the store as *held*; so does what exceeds the share of one stream, because a deep stream must not crowd out the
others. When a block is lifted, or a deep stream has room again, its held jobs are its *backlog*: until the backlog is
read to its end, newer jobs of the stream are held too, so that order is kept.

A job is waiting, then announced (the store has recorded that it is about to run, so that a crash is laid to its
account), then started, then ended; it is forgotten when the store has taken the report on it. Suspects, which were
running when a process died, are announced one at a time, so that the culprit is found and the others go free.
Bounds: ``jobs_max`` and ``bytes_max`` in all, ``per_stream_max`` of one stream. Beyond them nothing is claimed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.work.contract import Want
from holdfast.work.job import Block, Job


@dataclass(slots=True)
class _Stream:
    """``backlog`` is None when no held jobs are to be read, else the sequence after which they are."""

    queue: deque[Job] = field(default_factory=deque)
    blocks: list[Block] = field(default_factory=list)
    busy: bool = False
    listed: bool = False
    has_held: bool = False
    backlog: int | None = None

    def holds(self, job: Job) -> bool:
        return bool(self.blocks) and any(block.holds(job.seq, job.type) for block in self.blocks)

    def insert(self, job: Job) -> None:
        """In sequence order; almost always at the end, a retried head at the front."""
        if not self.queue or self.queue[-1].seq < job.seq:
            self.queue.append(job)
        else:
            place = next(i for i, other in enumerate(self.queue) if other.seq > job.seq)
            self.queue.insert(place, job)


class Streams:
    """The jobs a worker holds."""

    def __init__(self, jobs_max: int = 4096, bytes_max: int = 32 << 20, per_stream_max: int = 256) -> None:
        if min(jobs_max, bytes_max, per_stream_max) < 1:
            raise ValueError("jobs_max, bytes_max and per_stream_max must be at least 1")
        self._jobs_max, self._bytes_max, self._per_stream_max = jobs_max, bytes_max, per_stream_max
        self._waiting: dict[int, Job] = {}
        self._started: dict[int, Job] = {}
        self._ended: dict[int, Job] = {}
        self._streams: dict[str, _Stream] = {}
        self._backlogs: dict[str, None] = {}
        self._announced: set[int] = set()
        self._silent: deque[Job] = deque()
        self._put_off = 0
        self._suspect: int | None = None
        self._ready: deque[str | Job] = deque()
        self._bytes = 0
        self._held: list[int] = []
        self._closed: set[int] = set()
        self._unreported: dict[int, Block] = {}

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def started(self) -> dict[int, Job]:
        return self._started

    def room(self) -> tuple[int, int]:
        """How many jobs and bytes may still be claimed."""
        held = len(self._waiting) + len(self._started) + len(self._ended)
        return max(0, self._jobs_max - held), max(0, self._bytes_max - self._bytes)

    def add(self, jobs: Iterable[Job]) -> None:
        """Take newly claimed jobs, rising by sequence; those already known are ignored."""
        for job in jobs:
            if self._ignored(job):
                continue
            if job.stream is None:
                self._keep(job)
                continue
            stream = self._stream(job.stream)
            if stream.backlog is None and len(stream.queue) >= self._per_stream_max:
                self._want_backlog(job.stream, stream, stream.queue[-1].seq)
            if stream.holds(job) or (stream.backlog is not None and job.seq > stream.backlog):
                stream.has_held = True
                self._held.append(job.seq)
            else:
                self._join(stream, job)

    def add_backlog(self, jobs: Sequence[Job], asked: Want) -> None:
        """Take the held jobs that were asked for; a stream that got less than was asked for has no more."""
        # Where a stream is read from may have changed meanwhile: closed, rewound, or a block lifted or made.
        current = {
            key: stream
            for key, after in asked.backlogs.items()
            if (stream := self._streams.get(key)) is not None and stream.backlog == after
        }
        counts, sizes = dict.fromkeys(current, 0), dict.fromkeys(current, 0)
        for job in jobs:
            key = job.stream or ""
            if key not in current:
                continue
            stream = current[key]
            counts[key] += 1
            sizes[key] += len(job.payload)
            stream.backlog = job.seq
            if not self._ignored(job) and not stream.holds(job):
                self._join(stream, job)
        for key, stream in current.items():
            if counts[key] < asked.per_backlog and sizes[key] < asked.per_backlog_bytes:
                stream.backlog = None
                stream.has_held = bool(stream.blocks)
                self._backlogs.pop(key, None)
                self._forget(key, stream)

    def backlogs(self, limit: int = 64) -> dict[str, int]:
        """Some streams whose held jobs are wanted now, with the sequence after which; the others are next."""
        wanted: dict[str, int] = {}
        for key in self._backlogs:
            stream = self._streams[key]
            if stream.backlog is not None and len(stream.queue) <= self._per_stream_max // 2:
                wanted[key] = stream.backlog
                if len(wanted) >= limit:
                    break
        for key in wanted:
            del self._backlogs[key]
            self._backlogs[key] = None
        return wanted

    @property
    def announced(self) -> set[int]:
        """What the store knows, or is about to be told, as in flight."""
        return self._announced

    @property
    def announceable(self) -> bool:
        """Whether ``announce`` might find something."""
        return len(self._silent) > self._put_off or (bool(self._put_off) and self._suspect is None)

    @property
    def startable(self) -> int:
        """How many jobs ``next`` could start, at most."""
        return len(self._ready)

    def announce(self, limit: int) -> None:
        """Choose up to ``limit`` more waiting jobs to be told to the store as in flight.

        At least one if nothing else could run: what is announced may all wait for something that is not.
        """
        if not self._started and not self._ready:
            limit = max(limit, 1)
        put_off: list[Job] = []
        while self._silent and limit > 0:
            job = self._silent.popleft()
            if self._waiting.get(job.seq) is not job or job.seq in self._announced:
                continue
            if not self._may_announce(job):
                put_off.append(job)
                continue
            self._announce(job)
            limit -= 1
        self._silent.extendleft(reversed(put_off))
        self._put_off = len(put_off)

    def announced_by_store(self, seqs: Iterable[int]) -> None:
        """The store has recorded these on its own when it handed them out."""
        for seq in seqs:
            job = self._waiting.get(seq)
            if job is not None and seq not in self._announced and self._may_announce(job):
                self._announce(job)

    def next(self) -> Job | None:
        """Start the next announced job that may start; the caller runs it."""
        while self._ready:
            item = self._ready.popleft()
            if isinstance(item, Job):
                if self._waiting.get(item.seq) is item:
                    return self._start(item)
                continue
            stream = self._streams.get(item)
            if stream is None or not stream.listed:
                continue
            stream.listed = False
            if stream.queue and not stream.busy and stream.queue[0].seq in self._announced:
                stream.busy = True
                return self._start(stream.queue.popleft())
        return None

    def done(self, job: Job) -> None:
        """The job is finished for good, completed or dead: its own block is lifted and its stream goes on."""
        stream = self._end(job)
        if stream is None or job.stream is None:
            return
        if stream.blocks and any(block.head == job.seq for block in stream.blocks):
            stream.blocks = [block for block in stream.blocks if block.head != job.seq]
            if stream.has_held:
                self._want_backlog(job.stream, stream, 0)
        self._list(job.stream, stream)
        self._forget(job.stream, stream)

    def failed(self, job: Job, block: Block | None) -> None:
        """The job will be tried again: with a ``block`` its followers are held behind it, without they go on."""
        if block is None:
            self.done(job)
            return
        stream = self._end(job)
        if stream is None or job.stream is None:
            return
        stream.blocks = [other for other in stream.blocks if other.head != job.seq]
        stream.blocks.append(block)
        self._unreported[job.seq] = block
        stream.backlog = None  # it is read from its start when the block is lifted
        self._backlogs.pop(job.stream, None)
        for follower in [other for other in stream.queue if block.holds(other.seq, other.type)]:
            stream.queue.remove(follower)
            self._drop(follower)
            self._held.append(follower.seq)
            stream.has_held = True
        self._list(job.stream, stream)

    def reported(self, seqs: Iterable[int]) -> None:
        """The store has taken the report on these; they are forgotten."""
        for seq in seqs:
            job = self._ended.pop(seq, None)
            self._unreported.pop(seq, None)
            if job is not None:
                self._bytes -= len(job.payload)

    def take_held(self) -> list[int]:
        """Jobs to be marked as held since the last call."""
        held, self._held = self._held, []
        return held

    def rewound(self, blocks: Iterable[Block], backlogs: Iterable[str] = ()) -> None:
        """Everything is read again: drop what has not started, take blocks and backlogs as they are now.

        The store does not know yet what has ended without being reported: blocks made by such failures stay, and a
        block whose head has been done is lifted.
        """
        for job in list(self._waiting.values()):
            self._drop(job)
        self._ready.clear()
        self._silent.clear()
        self._held.clear()
        self._backlogs.clear()
        for key, stream in list(self._streams.items()):
            stream.queue.clear()
            stream.blocks, stream.backlog, stream.has_held, stream.listed = [], None, False, False
            self._forget(key, stream)
        known = {block.head: block for block in blocks} | self._unreported
        for block in known.values():
            stream = self._stream(block.stream)
            stream.has_held = True
            if block.head in self._ended and block.head not in self._unreported:
                self._want_backlog(block.stream, stream, 0)
            else:
                stream.blocks.append(block)
        for key in backlogs:
            self._want_backlog(key, self._stream(key), 0)

    def close(self, partitions: Iterable[int]) -> None:
        """Start nothing more of these partitions, and drop what has not started."""
        self._closed.update(partitions)
        for job in [job for job in self._waiting.values() if job.partition in self._closed]:
            self._drop(job)
            if job.stream is not None and job.stream in self._streams:
                stream = self._streams[job.stream]
                stream.queue.clear()
                stream.backlog = None
                self._backlogs.pop(job.stream, None)
                self._forget(job.stream, stream)

    def reopen(self, partitions: Iterable[int]) -> None:
        self._closed.difference_update(partitions)

    def in_use(self) -> set[int]:
        """The partitions of which something is started or unreported."""
        return {job.partition for jobs in (self._started, self._ended) for job in jobs.values()}

    def _ignored(self, job: Job) -> bool:
        seq = job.seq
        return seq in self._waiting or seq in self._started or seq in self._ended or job.partition in self._closed

    def _keep(self, job: Job) -> None:
        self._waiting[job.seq] = job
        self._silent.append(job)
        self._bytes += len(job.payload)

    def _drop(self, job: Job) -> None:
        del self._waiting[job.seq]
        self._bytes -= len(job.payload)
        self._unannounce(job)

    def _may_announce(self, job: Job) -> bool:
        """Suspects one at a time, and nothing behind a head that is not announced itself."""
        if job.suspect and self._suspect is not None:
            return False
        if job.stream is None:
            return True
        head = self._streams[job.stream].queue[0]
        return head is job or head.seq in self._announced

    def _announce(self, job: Job) -> None:
        self._announced.add(job.seq)
        if job.suspect:
            self._suspect = job.seq
        if job.stream is None:
            self._ready.append(job)
        else:
            self._list(job.stream, self._streams[job.stream])

    def _unannounce(self, job: Job) -> None:
        self._announced.discard(job.seq)
        if self._suspect == job.seq:
            self._suspect = None

    def _join(self, stream: _Stream, job: Job) -> None:
        self._keep(job)
        stream.insert(job)

    def _start(self, job: Job) -> Job:
        del self._waiting[job.seq]
        self._started[job.seq] = job
        return job

    def _end(self, job: Job) -> _Stream | None:
        del self._started[job.seq]
        self._unannounce(job)
        self._ended[job.seq] = job
        if job.stream is None:
            return None
        stream = self._streams[job.stream]
        stream.busy = False
        return stream

    def _stream(self, key: str) -> _Stream:
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Stream()
        return stream

    def _want_backlog(self, key: str, stream: _Stream, after: int) -> None:
        stream.backlog = after
        stream.has_held = True  # still so if a failure drops the backlog before it is read
        self._backlogs[key] = None

    def _list(self, key: str, stream: _Stream) -> None:
        if stream.queue and not stream.busy and not stream.listed and stream.queue[0].seq in self._announced:
            stream.listed = True
            self._ready.append(key)

    def _forget(self, key: str, stream: _Stream) -> None:
        """An idle stream costs no memory."""
        if not (stream.queue or stream.blocks or stream.busy or stream.backlog is not None):
            del self._streams[key]
