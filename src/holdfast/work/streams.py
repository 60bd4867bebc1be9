"""What a worker holds in memory, and which job may start now. (Pure.)

Jobs of a stream start in sequence order, one after another; streams run side by side. A job behind a block goes back
to the store as *held*; so does what exceeds the share of one stream, because a deep stream must not crowd out the
others. When a block is lifted, or a deep stream has room again, its held jobs are its *backlog*: until the backlog is
read to its end, newer jobs of the stream are held too, so that order is kept.

A job is waiting, then announced (the store has recorded that it is about to run, so that a crash is laid to its
account), then started, then ended; it is forgotten when the store has taken the report on it. What is announced of a
stream is always the front of its queue; its first job in flight is a *head*, the others are *ahead* of their time.
Heads come first, so that a deep stream keeps nobody waiting. How many of a stream are announced ahead of their time
follows its pace, twice what ended between two announcements: a slow stream has one. Suspects, which were running when
a process died, are announced one at a time, so that the culprit is found and the others go free.

Bounds: ``jobs_max`` and ``bytes_max`` in all, ``per_stream_max`` of one stream. Beyond them nothing is claimed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from holdfast.work.contract import Want
from holdfast.work.job import Block, Job


@dataclass(slots=True)
class _Stream:
    """``told``: how many of the queue, from its front, are announced. ``reach``: how many may be, behind the head;
    it follows how many ``ended`` since the last ``round`` of announcements.

    ``backlog`` is None when no held jobs are to be read, else the sequence after which they are.
    """

    queue: deque[Job] = field(default_factory=deque)
    blocks: list[Block] = field(default_factory=list)
    told: int = 0
    reach: int = 1
    ended: int = 0
    round: int = 0
    busy: bool = False
    listed: bool = False
    has_held: bool = False
    backlog: int | None = None

    @property
    def in_flight(self) -> int:
        return self.told + self.busy

    def kept_pace(self, round: int) -> None:
        """One more of its jobs has ended after this round of announcements."""
        if self.round != round:
            self.round, self.ended, self.reach = round, 0, max(1, self.reach // 2)
        self.ended += 1
        self.reach = max(self.reach, 2 * self.ended - 1)

    def holds(self, job: Job) -> bool:
        return bool(self.blocks) and any(block.holds(job.seq, job.type) for block in self.blocks)


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
        self._ahead = 0
        self._round = 0
        # To be announced, by stream, or by sequence without one. A head may start when it is announced; a follower's
        # stream has something in flight; a suspect waits until no other is in flight.
        self._heads: OrderedDict[str | int, None] = OrderedDict()
        self._followers: OrderedDict[str | int, None] = OrderedDict()
        self._suspects: OrderedDict[str | int, None] = OrderedDict()
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
                self._heads[job.seq] = None
                continue
            stream = self._stream(job.stream)
            if stream.backlog is None and len(stream.queue) >= self._per_stream_max:
                self._want_backlog(job.stream, stream, stream.queue[-1].seq)
            if stream.holds(job) or (stream.backlog is not None and job.seq > stream.backlog):
                stream.has_held = True
                self._held.append(job.seq)
            else:
                self._join(job.stream, stream, job)

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
                self._join(key, stream, job)
        for key, stream in current.items():
            if counts[key] < asked.per_backlog and sizes[key] < asked.per_backlog_bytes:
                stream.backlog = None
                stream.has_held = bool(stream.blocks)
                self._backlogs.pop(key, None)
                self._forget(key, stream)

    def backlogs(self, limit: int = 64) -> dict[str, int]:
        """Some streams whose held jobs are wanted now, with the sequence after which; the others are next."""
        wanted: dict[str, int] = {}
        enough = self._share() // 2
        for key in self._backlogs:
            stream = self._streams[key]
            if stream.backlog is not None and len(stream.queue) <= enough:
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
    def ahead(self) -> int:
        """How many of the announced stand behind another one of their stream."""
        return self._ahead

    def announceable(self, heads: int, ahead: int) -> bool:
        """Whether ``announce`` might find something."""
        if heads > 0 and (self._heads or (self._suspects and self._suspect is None)):
            return True
        return ahead > 0 and bool(self._followers)

    @property
    def startable(self) -> int:
        """How many jobs ``next`` could start, at most."""
        return len(self._ready)

    def announce(self, heads: int, ahead: int) -> None:
        """Choose more waiting jobs to be told to the store as in flight: up to ``heads`` that could start at once,
        oldest first, and up to ``ahead`` behind those.
        """
        self._round += 1
        while self._suspects and self._suspect is None and heads > 0:
            key, _ = self._suspects.popitem(last=False)
            if isinstance(key, str) and self._streams[key].in_flight:
                self._followers[key] = None
            else:
                heads -= self._announce(key, 1)
        while self._heads and heads > 0:
            heads -= self._announce(self._heads.popitem(last=False)[0], 1)
        while self._followers and ahead > 0:
            ahead -= self._announce(self._followers.popitem(last=False)[0], ahead)

    def announced_by_store(self, seqs: Iterable[int]) -> None:
        """The store has recorded these on its own when it handed them out; some may have to wait all the same."""
        for seq in sorted(seqs):
            job = self._waiting.get(seq)
            if job is None or seq in self._announced:
                continue
            key = job.stream if job.stream is not None else seq
            place = self._heads if key in self._heads else self._followers
            if key in place and self._following(key) is job:
                del place[key]
                self._announce(key, 1)

    def make_room(self, runners: int) -> None:
        """Give back what is beyond the share of a stream, if so few of them fill the memory that runners are idle."""
        if len(self._announced) - self._ahead + len(self._heads) >= runners:
            return
        jobs_max, bytes_max = self._share(), self._bytes_max // (2 * max(1, len(self._streams)))
        for key, stream in self._streams.items():
            kept = size = 0
            for job in stream.queue:
                size += len(job.payload)
                if kept and (kept >= jobs_max or size > bytes_max):
                    break
                kept += 1
            if kept < len(stream.queue):
                self._give_back(key, stream, [stream.queue[place] for place in range(kept, len(stream.queue))])
                self._want_backlog(key, stream, stream.queue[-1].seq)

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
            if stream.told and not stream.busy:
                stream.busy = True
                stream.told -= 1
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
        self._give_back(job.stream, stream, [other for other in stream.queue if block.holds(other.seq, other.type)])
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
            self._unannounce(job)
        for waiting in (self._heads, self._followers, self._suspects):
            waiting.clear()
        self._ahead = 0
        self._ready.clear()
        self._held.clear()
        self._backlogs.clear()
        for key, stream in list(self._streams.items()):
            stream.queue.clear()
            stream.told = 0
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
            if job.stream is None:
                self._unannounce(job)
                self._displace(job.seq)
            elif job.stream in self._streams:
                stream = self._streams[job.stream]
                self._silence(stream, 0)
                stream.queue.clear()
                stream.backlog = None
                self._backlogs.pop(job.stream, None)
                self._displace(job.stream)
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
        self._bytes += len(job.payload)

    def _drop(self, job: Job) -> None:
        del self._waiting[job.seq]
        self._bytes -= len(job.payload)

    def _share(self) -> int:
        """How many jobs of one stream are enough when the memory is full: all of them together fill half of it."""
        return max(1, min(self._per_stream_max, self._jobs_max // (2 * max(1, len(self._streams)))))

    def _following(self, key: str | int) -> Job:
        """The next job to be announced of this stream, or the job itself."""
        if isinstance(key, int):
            return self._waiting[key]
        stream = self._streams[key]
        return stream.queue[stream.told]

    def _announce(self, key: str | int, most: int) -> int:
        """Announce the job, or what follows in the stream, up to its reach; put the stream where it belongs then."""
        if isinstance(key, int):
            return self._tell(key, (self._waiting[key],))
        stream = self._streams[key]
        in_flight = stream.in_flight
        most = min(most, max(1, stream.reach + 1 - in_flight))
        count = self._tell(key, islice(stream.queue, stream.told, stream.told + most))
        if count:
            self._ahead += count if in_flight else count - 1
            stream.told += count
            self._list(key, stream)
        if key not in self._suspects:
            self._offer(key, stream)
        return count

    def _tell(self, key: str | int, jobs: Iterable[Job]) -> int:
        """How many could be announced: a suspect waits until no other is in flight."""
        count = 0
        for job in jobs:
            if job.crashes:
                if self._suspect is not None:
                    self._suspects[key] = None
                    break
                self._suspect = job.seq
            self._announced.add(job.seq)
            count += 1
        if count and isinstance(key, int):
            self._ready.append(self._waiting[key])
        return count

    def _unannounce(self, job: Job) -> None:
        self._announced.discard(job.seq)
        if self._suspect == job.seq:
            self._suspect = None

    def _silence(self, stream: _Stream, told: int) -> None:
        """Only the first ``told`` jobs of the queue stay announced; none of the others has started."""
        while stream.told > told:
            stream.told -= 1
            self._unannounce(stream.queue[stream.told])
            self._ahead -= stream.in_flight > 0

    def _place(self, key: str, stream: _Stream) -> None:
        """Put the stream where it belongs after its queue has changed."""
        self._displace(key)
        self._offer(key, stream)

    def _offer(self, key: str, stream: _Stream) -> None:
        """Put the stream where its next job to be announced belongs, if there is one."""
        if stream.told < len(stream.queue):
            in_flight = stream.in_flight
            if not in_flight:
                self._heads[key] = None
            elif in_flight <= stream.reach:
                self._followers[key] = None

    def _displace(self, key: str | int) -> None:
        for waiting in (self._heads, self._followers, self._suspects):
            waiting.pop(key, None)

    def _give_back(self, key: str, stream: _Stream, jobs: Sequence[Job]) -> None:
        """These go back to the store as held."""
        if not jobs:
            return
        first = next(place for place, job in enumerate(stream.queue) if job is jobs[0])
        self._silence(stream, first)
        gone = {job.seq for job in jobs}
        stream.queue = deque(job for job in stream.queue if job.seq not in gone)
        for job in jobs:
            self._drop(job)
        self._held.extend(gone)
        stream.has_held = True
        self._place(key, stream)

    def _join(self, key: str, stream: _Stream, job: Job) -> None:
        """In sequence order; almost always at the end, a retried head at the front."""
        self._keep(job)
        queue = stream.queue
        if not queue or queue[-1].seq < job.seq:
            queue.append(job)
            if stream.told == len(queue) - 1:
                self._offer(key, stream)
        else:
            place = next(i for i, other in enumerate(queue) if other.seq > job.seq)
            self._silence(stream, place)
            queue.insert(place, job)
            self._place(key, stream)

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
        stream.kept_pace(self._round)
        if stream.told:
            self._ahead -= 1
        if stream.told < len(stream.queue) and job.stream not in self._suspects:
            if not stream.told:
                self._followers.pop(job.stream, None)
            self._offer(job.stream, stream)
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
        if stream.told and not stream.busy and not stream.listed:
            stream.listed = True
            self._ready.append(key)

    def _forget(self, key: str, stream: _Stream) -> None:
        """An idle stream costs no memory."""
        if not (stream.queue or stream.blocks or stream.busy or stream.backlog is not None):
            del self._streams[key]
