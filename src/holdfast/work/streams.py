"""The jobs that a worker holds in memory, and what each of them waits for. (Pure.)

The jobs of a stream start one after another, in sequence order; streams run side by
side. A job behind a block goes back to the store as *held*. So does a job beyond its
stream's share of the memory: a deep stream must not crowd out the others. When the
block is lifted, or the stream has room again, its held jobs are its *backlog*. Until
the worker has read the whole backlog, it also holds newer jobs of the stream, so that
order is kept.

A job waits, is announced, starts and ends (``dispatch``). The worker forgets it when
the store has accepted the report on it.

Bounds: the worker claims nothing beyond ``jobs_max`` and ``bytes_max`` in all. It holds
jobs beyond ``per_stream_max`` of one stream, or beyond the share of one destination
(``destinations``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.work.contract import PER_BACKLOG, ClaimRequest
from holdfast.work.destinations import Destinations
from holdfast.work.dispatch import Dispatch, Line
from holdfast.work.job import Block, Job

Target = tuple[str, str] | None
"""The (job type, destination) whose cap a stream shares; None: no cap."""


@dataclass(slots=True, eq=False)
class _Stream(Line):
    """A stream with jobs, blocks or a backlog.

    ``backlog``: the sequence after which held jobs are to be read; None: there are none
    to read. Backlogs with the same ``target`` take turns.
    """

    blocks: list[Block] = field(default_factory=list)
    has_held: bool = False
    backlog: int | None = None
    target: Target = None

    def holds(self, job: Job) -> bool:
        return bool(self.blocks) and any(block.holds(job.seq, job.type) for block in self.blocks)

    def holds_the_rest(self, job: Job) -> bool:
        """Whether everything behind this job is held as well."""
        return any(block.holds(job.seq, job.type) and not block.released for block in self.blocks)


class Streams:
    """The jobs that a worker holds, by stream and by what became of them."""

    def __init__(
        self,
        jobs_max: int = 4096,
        bytes_max: int = 32 << 20,
        per_stream_max: int = 256,
        destinations: Destinations | None = None,
    ) -> None:
        self._jobs_max, self._bytes_max, self._per_stream_max = jobs_max, bytes_max, per_stream_max
        self._destinations = destinations or Destinations()
        self._waiting: dict[int, Job] = {}
        self._started: dict[int, Job] = {}
        self._ended: dict[int, Job] = {}
        self._streams: dict[str, _Stream] = {}
        self._backlogs: dict[Target, dict[str, None]] = {}
        """Streams to read held jobs of; targets and their streams take turns."""
        self.dispatch = Dispatch(self._waiting, self._destinations)
        self._capped = self._destinations.are_capped
        self._bytes = 0
        self._held: dict[int, int] = {}
        """Jobs that the next report marks as held, with their partitions."""
        self._closed: set[int] = set()
        self._unreported: dict[int, Block] = {}

    @property
    def started(self) -> dict[int, Job]:
        return self._started

    def ended(self, seq: int) -> Job | None:
        """The job with this sequence, if it has ended and is not reported yet."""
        return self._ended.get(seq)

    def room(self) -> tuple[int, int]:
        """How many jobs and bytes may still be claimed."""
        held = len(self._waiting) + len(self._started) + len(self._ended)
        return max(0, self._jobs_max - held), max(0, self._bytes_max - self._bytes)

    def add(self, jobs: Iterable[Job]) -> None:
        """Take newly claimed jobs, rising by sequence; known ones are ignored."""
        for job in jobs:
            if self._ignored(job):
                continue
            if job.stream is None:
                self._keep(job)
                self.dispatch.offer_alone(job.seq)
                continue
            if self._capped and self._destinations.is_paused(job):
                self._held[job.seq] = job.partition  # the rewind that ends the pause reads it again
                continue
            stream = self._stream(job.stream)
            if stream.backlog is None and (
                len(stream.queue) >= self._per_stream_max or self._crowded(job)
            ):
                self._request_backlog(
                    job.stream,
                    stream,
                    stream.queue[-1].seq if stream.queue else 0,
                    self._target(job),
                )
            if stream.holds(job) or (stream.backlog is not None and job.seq > stream.backlog):
                stream.has_held = True
                self._held[job.seq] = job.partition
            else:
                self._join(stream, job)

    def add_backlog(self, jobs: Sequence[Job], asked: ClaimRequest, through: int) -> None:
        """Take the requested held jobs; a stream with fewer than requested has no more.

        Jobs beyond ``through`` are dropped and read again later: the stream's previous
        owner may have left ready jobs before them that are not read yet.
        """
        # A close, a rewind or a change of blocks may have moved the backlog's start.
        current = {
            key: stream
            for key, after in asked.backlogs.items()
            if (stream := self._streams.get(key)) is not None and stream.backlog == after
        }
        counts, sizes = dict.fromkeys(current, 0), dict.fromkeys(current, 0)
        for job in jobs:
            key = job.stream or ""
            if job.seq > through:
                current.pop(key, None)
            if key not in current:
                continue
            stream = current[key]
            if stream.target is None and self._destinations.is_capped(job):
                self._request_backlog(key, stream, stream.backlog or 0, self._target(job))
            if self._destinations.is_paused(job) or stream.holds_the_rest(job):
                # read from its start when the pause or the block ends
                self._end_backlog(key, stream)
                stream.has_held = True
                self._forget(key, stream)
                del current[key]
                continue
            if self._crowded(job):
                del current[key]  # the rest is read again later
                continue
            counts[key] += 1
            sizes[key] += len(job.payload)
            stream.backlog = job.seq
            if not self._ignored(job) and not stream.holds(job):
                self._join(stream, job)
        for key, stream in current.items():
            if counts[key] < asked.per_backlog and sizes[key] < asked.per_backlog_bytes:
                self._end_backlog(key, stream)
                stream.has_held = bool(stream.blocks)
                self._forget(key, stream)

    def backlogs(self, limit: int = 64) -> dict[str, int]:
        """The next streams to read held jobs of, and the sequence to read after."""
        requested: dict[str, int] = {}
        for target in list(self._backlogs):
            chosen = self._choose(target, limit - len(requested))
            requested.update(chosen)
            turns = self._backlogs[target]
            for key in chosen:
                del turns[key]
                turns[key] = None
            if chosen:
                del self._backlogs[target]
                self._backlogs[target] = turns
            if len(requested) >= limit:
                break
        return requested

    def _choose(self, target: Target, limit: int) -> dict[str, int]:
        """Streams of one target to read now, so few that their jobs fit its memory."""
        if target is not None:
            jobs_max, jobs = (
                self._destinations.memory_of_one(self._jobs_max),
                self._destinations.jobs(target),
            )
            limit = (
                min(limit, max(1, (jobs_max - jobs) // PER_BACKLOG)) if 2 * jobs <= jobs_max else 0
            )
        chosen: dict[str, int] = {}
        enough = self._share() // 2
        for key in self._backlogs[target]:
            if len(chosen) >= limit:
                break
            stream = self._streams[key]
            if stream.backlog is not None and len(stream.queue) <= enough:
                chosen[key] = stream.backlog
        return chosen

    def announced_by_store(self, seqs: Iterable[int]) -> None:
        """Note the jobs that the store recorded as in flight when it handed them out.

        Some of them may still have to wait here.
        """
        for seq in sorted(seqs):
            job = self._waiting.get(seq)
            if job is not None and seq not in self.dispatch.announced:
                candidate = seq if job.stream is None else self._streams[job.stream]
                self.dispatch.announced_by_store(job, candidate)

    def make_room(self, runners: int) -> None:
        """Give back what exceeds a stream's or destination's share, if runners are
        idle.

        Runners are idle in a full memory when too few streams fill it.
        """
        if self.dispatch.abreast >= runners:
            return
        self._make_room_of_destinations()
        jobs_max, bytes_max = self._share(), self._bytes_max // (2 * max(1, len(self._streams)))
        for key, stream in self._streams.items():
            kept = size = 0
            for job in stream.queue:
                size += len(job.payload)
                if kept and (kept >= jobs_max or size > bytes_max):
                    break
                kept += 1
            if kept < len(stream.queue):
                self._give_back(
                    stream, [stream.queue[index] for index in range(kept, len(stream.queue))]
                )
                last = stream.queue[-1]
                self._request_backlog(key, stream, last.seq, self._target(last))

    def _make_room_of_destinations(self) -> None:
        """Shrink destinations to their share, which falls as their number grows."""
        share = self._destinations.memory_of_one(self._jobs_max)
        for destination in self._destinations.beyond(share):
            for line in reversed(list(destination.lines)):
                if destination.jobs <= share:
                    break
                key = line.queue[0].stream
                stream = self._streams[key]
                self._give_back(stream, list(stream.queue))
                self._request_backlog(key, stream, 0, (destination.type, destination.name))

    def next(self) -> Job | None:
        """Start the next announced job that may start; the caller runs it."""
        job = self.dispatch.next()
        if job is not None:
            del self._waiting[job.seq]
            if self._capped:
                self._destinations.dropped(job)
                self._destinations.started(job)
            self._started[job.seq] = job
        return job

    def done(self, job: Job) -> None:
        """The job is completed or dead: lift its own block and continue its stream."""
        stream = self._end(job)
        if stream is None or job.stream is None:
            return
        if stream.blocks and any(block.head == job.seq for block in stream.blocks):
            stream.blocks = [block for block in stream.blocks if block.head != job.seq]
            if stream.has_held:
                self._request_backlog(job.stream, stream, 0, self._target(job))
        self.dispatch.go_on(stream)
        self._forget(job.stream, stream)

    def failed(self, job: Job, block: Block | None) -> None:
        """The job will be retried. A ``block`` holds its followers."""
        if block is None:
            self.done(job)
            return
        stream = self._end(job)
        if stream is None or job.stream is None:
            return
        stream.blocks = [other for other in stream.blocks if other.head != job.seq]
        stream.blocks.append(block)
        self._unreported[job.seq] = block
        self._end_backlog(job.stream, stream)  # read from its start when the block is lifted
        self._give_back(
            stream, [other for other in stream.queue if block.holds(other.seq, other.type)]
        )
        self.dispatch.go_on(stream)

    def reported(self, seqs: Iterable[int]) -> None:
        """Forget these jobs: the store has accepted the report on them."""
        for seq in seqs:
            job = self._ended.pop(seq, None)
            self._unreported.pop(seq, None)
            if job is not None:
                self._bytes -= len(job.payload)

    def take_held(self) -> list[int]:
        """The jobs to mark as held since the last call."""
        held, self._held = list(self._held), {}
        return held

    def rewound(
        self,
        blocks: Iterable[Block],
        backlogs: Mapping[str, tuple[str, str]] | None = None,
        paused: Collection[tuple[str, str]] = frozenset(),
    ) -> None:
        """Start over after a rewind: drop what has not started, and take the store's
        blocks and backlogs and the current pauses.

        The store does not know the jobs that ended but are not reported yet. So the
        blocks of such failures stay, and blocks whose head is done are lifted.
        """
        self.dispatch.clear(self._streams.values())
        for job in list(self._waiting.values()):
            self._drop(job)
        self._held.clear()
        self._backlogs.clear()
        for key, stream in list(self._streams.items()):
            stream.blocks, stream.backlog, stream.target, stream.has_held = [], None, None, False
            self._forget(key, stream)
        self._destinations.paused = paused
        known = {block.head: block for block in blocks} | self._unreported
        for block in known.values():
            stream = self._stream(block.stream)
            stream.has_held = True
            if block.head in self._ended and block.head not in self._unreported:
                self._request_backlog(block.stream, stream, 0, None)
            else:
                stream.blocks.append(block)
        for key, (job_type, destination) in (backlogs or {}).items():
            if (job_type, destination) not in paused:
                target = (job_type, destination) if self._destinations.has_cap(job_type) else None
                self._request_backlog(key, self._stream(key), 0, target)

    def close(self, partitions: Iterable[int]) -> None:
        """Start nothing more of these partitions, and drop what has not started.

        Their jobs are not marked as held any more either: the next owner may have read
        past them by then.
        """
        self._closed.update(partitions)
        self._held = {
            seq: partition for seq, partition in self._held.items() if partition not in self._closed
        }
        for job in [job for job in self._waiting.values() if job.partition in self._closed]:
            self._drop(job)
            if job.stream is None:
                self.dispatch.withdraw_alone(job)
            elif job.stream in self._streams:
                stream = self._streams[job.stream]
                self.dispatch.empty(stream)
                self._end_backlog(job.stream, stream)
                self._forget(job.stream, stream)

    def reopen(self, partitions: Iterable[int]) -> None:
        self._closed.difference_update(partitions)

    def in_use(self) -> set[int]:
        """The partitions with jobs that are running or not reported yet."""
        return {job.partition for jobs in (self._started, self._ended) for job in jobs.values()}

    def _ignored(self, job: Job) -> bool:
        seq = job.seq
        return (
            seq in self._waiting
            or seq in self._started
            or seq in self._ended
            or job.partition in self._closed
        )

    def _keep(self, job: Job) -> None:
        self._waiting[job.seq] = job
        self._bytes += len(job.payload)
        if self._capped:
            self._destinations.kept(job)

    def _drop(self, job: Job) -> None:
        del self._waiting[job.seq]
        self._bytes -= len(job.payload)
        if self._capped:
            self._destinations.dropped(job)

    def _target(self, job: Job) -> Target:
        return (job.type, job.destination) if self._destinations.is_capped(job) else None

    def _crowded(self, job: Job) -> bool:
        """Whether its destination fills its share of the memory."""
        destinations = self._destinations
        destination = destinations.of(job) if self._capped else None
        return destination is not None and (
            destination.jobs >= destinations.memory_of_one(self._jobs_max)
            or destination.bytes >= destinations.memory_of_one(self._bytes_max)
        )

    def _share(self) -> int:
        """The jobs of one stream when memory is full; all together fill half."""
        return max(1, min(self._per_stream_max, self._jobs_max // (2 * max(1, len(self._streams)))))

    def _give_back(self, stream: _Stream, jobs: Sequence[Job]) -> None:
        """Give these jobs back to the store as held."""
        if not jobs:
            return
        first = next(index for index, job in enumerate(stream.queue) if job is jobs[0])
        self.dispatch.withdraw_after(stream, first)
        gone = {job.seq for job in jobs}
        stream.queue = deque(job for job in stream.queue if job.seq not in gone)
        for job in jobs:
            self._drop(job)
            self._held[job.seq] = job.partition
        stream.has_held = True
        self.dispatch.requeue(stream)

    def _join(self, stream: _Stream, job: Job) -> None:
        """Insert in sequence order: almost always last; a retried head goes first."""
        self._keep(job)
        queue = stream.queue
        if not queue or queue[-1].seq < job.seq:
            queue.append(job)
            if stream.announced == len(queue) - 1:
                self.dispatch.offer(stream)
        else:
            index = next(i for i, other in enumerate(queue) if other.seq > job.seq)
            self.dispatch.withdraw_after(stream, index)
            queue.insert(index, job)
            self.dispatch.requeue(stream)

    def _end(self, job: Job) -> _Stream | None:
        del self._started[job.seq]
        self._ended[job.seq] = job
        if job.stream is None:
            self.dispatch.withdraw(job)
            return None
        stream = self._streams[job.stream]
        if self._capped:
            self._destinations.ended(job)
        self.dispatch.ended(stream, job)
        return stream

    def _stream(self, key: str) -> _Stream:
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = _Stream()
        return stream

    def _request_backlog(self, key: str, stream: _Stream, after: int, target: Target) -> None:
        self._end_backlog(key, stream)
        stream.backlog, stream.target = after, target
        stream.has_held = True  # stays true if a failure drops the backlog before it is read
        self._backlogs.setdefault(target, {})[key] = None

    def _end_backlog(self, key: str, stream: _Stream) -> None:
        stream.backlog = None
        if (turns := self._backlogs.get(stream.target)) is not None:
            turns.pop(key, None)
            if not turns:
                del self._backlogs[stream.target]

    def _forget(self, key: str, stream: _Stream) -> None:
        """Drop the stream if it is idle, so that it costs no memory."""
        if not (stream.queue or stream.blocks or stream.busy or stream.backlog is not None):
            del self._streams[key]
