"""Which waiting jobs are announced to the store next, and which of those may start.
(Pure.)

A job is waiting, then announced (the store has recorded that it is about to run, so
that a crash is laid to its account), then started, then ended. What is announced of a
stream is always the front of its line; its first job in flight is a *head*, the others
are *ahead* of their time. Heads come first, so that a deep stream keeps nobody waiting.
How many of a line are announced ahead of their time follows its pace, twice what ended
between two announcements: a slow stream has one. A job without a stream is a head that
nobody follows. A job whose type has a cap per destination (``destinations``) is
announced as a head only, and not while its destination has reached the cap.

A *suspect* was in flight when a process died. A death is laid to the suspects in
flight, if there are any; so the culprit is found, and the others go free, in three
steps. Jobs with one crash are announced as heads only, at most ``SUSPECTS_MAX`` at
once, beside whatever else is in flight. One with more crashes is announced when nothing
is in flight, and nothing else until it has ended: while such a job waits, no other is
announced. The third death is its own.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from holdfast.work.destinations import Destination, Destinations
from holdfast.work.job import SUSPECTS_MAX, Job


@dataclass(slots=True, eq=False)
class Line:
    """The jobs of a stream, which start one after another.

    ``announced``: how many of the queue are, from its front. ``reach``: how many
    may be, behind the head; it follows how many ``ended`` since the last ``round`` of
    announcements. ``busy``: one has started. ``waits_for``: the destination that has
    reached its cap.
    """

    queue: deque[Job] = field(default_factory=deque)
    announced: int = 0
    reach: int = 1
    ended: int = 0
    round: int = 0
    busy: bool = False
    listed: bool = False
    waits_for: Destination | None = None

    @property
    def in_flight(self) -> int:
        return self.announced + self.busy

    def on_job_ended(self, round: int) -> None:
        """One more of its jobs has ended after this round of announcements."""
        if self.round != round:
            self.round, self.ended, self.reach = round, 0, max(1, self.reach // 2)
        self.ended += 1
        self.reach = max(self.reach, 2 * self.ended - 1)


_Candidate = Line | int
"""The next to be announced: a line, or the sequence of a job without a stream."""


class Dispatch:
    """What to announce, in turn. ``waiting`` maps the sequences of jobs that have not
    started to the jobs; the caller owns it and keeps it up to date."""

    def __init__(self, waiting: Mapping[int, Job], destinations: Destinations) -> None:
        self._waiting, self._destinations = waiting, destinations
        self._capped = destinations.are_capped
        self.announced: set[int] = set()
        """What the store knows, or will know with the next report, as in flight."""
        self.ahead = 0
        """How many of the announced stand behind another one of their line."""
        self._round = 0
        # A head may start when it is announced; a follower's line has something in
        # flight; a suspect waits for others, a loner until nothing is in flight.
        self._heads: OrderedDict[_Candidate, None] = OrderedDict()
        self._followers: OrderedDict[_Candidate, None] = OrderedDict()
        self._suspects: OrderedDict[_Candidate, None] = OrderedDict()
        self._loners: OrderedDict[_Candidate, None] = OrderedDict()
        self._suspects_in_flight: set[int] = set()
        self._loner_in_flight: int | None = None
        self._all_waiting = (self._heads, self._followers, self._suspects, self._loners)
        self._ready: deque[Line | Job] = deque()
        self._in_turn: Line | None = None

    @property
    def startable(self) -> int:
        """How many jobs ``next`` could start, at most."""
        return len(self._ready)

    @property
    def abreast(self) -> int:
        """How many jobs could run side by side if every head were announced."""
        return len(self.announced) - self.ahead + len(self._heads)

    @property
    def isolates(self) -> bool:
        """Whether a job is, or is to be, in flight alone: nothing else is announced."""
        return self._loner_in_flight is not None or bool(self._loners)

    @property
    def _has_turn(self) -> bool:
        """Whether a suspect waits that may be announced."""
        return bool(self._suspects) and len(self._suspects_in_flight) < SUSPECTS_MAX

    def possible(self, heads: int, ahead: int) -> bool:
        """Whether ``announce`` might find something."""
        if self.isolates:
            return not self.announced
        if heads > 0 and (
            self._heads or self._has_turn or (self._capped and self._destinations.has_turn())
        ):
            return True
        return ahead > 0 and bool(self._followers)

    def announce(self, heads: int, ahead: int) -> None:
        """Choose more waiting jobs to announce to the store as in flight: up to
        ``heads`` that could start at once, oldest first, and up to ``ahead`` behind
        those.
        """
        self._round += 1
        if self._loners and not self.announced:
            self._announce(self._loners.popitem(last=False)[0], 1)
        while self._has_turn and heads > 0 and not self.isolates:
            heads -= self._announce(self._suspects.popitem(last=False)[0], 1)
        heads -= self._announce_waiting(heads)
        while self._heads and heads > 0 and not self.isolates:
            heads -= self._announce(self._heads.popitem(last=False)[0], 1)
        heads -= self._announce_waiting(heads)
        while self._followers and ahead > 0 and not self.isolates:
            ahead -= self._announce(self._followers.popitem(last=False)[0], ahead)

    def announced_by_store(self, job: Job, candidate: _Candidate) -> None:
        """The store has recorded it on its own when it handed it out; it may have to
        wait all the same.
        """
        waiting = self._heads if candidate in self._heads else self._followers
        if candidate in waiting and (
            isinstance(candidate, int) or candidate.queue[candidate.announced] is job
        ):
            del waiting[candidate]
            self._announce(candidate, 1)

    def next(self) -> Job | None:
        """The next announced job that may start; it counts as started from now on."""
        while self._ready:
            line = self._ready.popleft()
            if isinstance(line, Job):
                if line.seq in self.announced and self._waiting.get(line.seq) is line:
                    return line
                continue
            line.listed = False
            if line.announced and not line.busy:
                line.busy = True
                line.announced -= 1
                return line.queue.popleft()
        return None

    def ended(self, line: Line, job: Job) -> None:
        """A job of the line that was started is in flight no longer; whether the line
        goes on is not said yet.
        """
        self.withdraw(job)
        line.busy = False
        line.on_job_ended(self._round)
        if line.announced:
            self.ahead -= 1
        if line.announced < len(line.queue):
            if not line.announced:
                self._followers.pop(line, None)
            self.offer(line)

    def go_on(self, line: Line) -> None:
        """What is announced of the line may start, if nothing of it has."""
        if line.announced and not line.busy and not line.listed:
            line.listed = True
            self._ready.append(line)

    def offer_alone(self, seq: int) -> None:
        """A job without a stream."""
        self._heads[seq] = None

    def offer(self, line: Line) -> None:
        """Put the line where its next job to be announced belongs, if there is one."""
        if line.announced < len(line.queue):
            in_flight = line.in_flight
            if not in_flight:
                self._heads[line] = None
            elif in_flight <= line.reach and not self._only_as_head(line.queue[line.announced]):
                self._followers[line] = None

    def requeue(self, line: Line) -> None:
        """Put the line where it belongs after its queue has changed."""
        self._remove(line)
        self.offer(line)

    def withdraw_after(self, line: Line, count: int) -> None:
        """Only the first ``count`` jobs stay announced; no other has started."""
        while line.announced > count:
            line.announced -= 1
            self.withdraw(line.queue[line.announced])
            self.ahead -= line.in_flight > 0

    def empty(self, line: Line) -> None:
        """Nothing waits in the line any more."""
        self.withdraw_after(line, 0)
        line.queue.clear()
        self._remove(line)

    def clear(self, lines: Iterable[Line]) -> None:
        """Nothing waits any more, in ``lines`` (all there are) or without one."""
        for seq in self.announced & self._waiting.keys():
            self.withdraw(self._waiting[seq])
        self._destinations.clear_lines()
        for line in lines:
            line.queue.clear()
            line.announced, line.listed, line.waits_for = 0, False, None
        for waiting in self._all_waiting:
            waiting.clear()
        self.ahead = 0
        self._ready.clear()

    def withdraw_alone(self, job: Job) -> None:
        """A job without a stream that waited no longer does."""
        self.withdraw(job)
        self._remove(job.seq)

    def withdraw(self, job: Job) -> None:
        if job.seq not in self.announced:
            return
        self.announced.discard(job.seq)
        self._suspects_in_flight.discard(job.seq)
        if self._loner_in_flight == job.seq:
            self._loner_in_flight = None
        if self._capped and (destination := self._destinations.of(job)) is not None:
            self._destinations.withdrawn(destination)

    def _announce_waiting(self, most: int) -> int:
        """Announce streams that waited for their destination; returns how many."""
        count = 0
        while self._capped and count < most and not self.isolates:
            line = self._in_turn = self._destinations.next_turn()
            if line is None:
                break
            line.waits_for = None
            count += self._announce(line, 1)
        self._in_turn = None
        return count

    def _announce(self, line: _Candidate, most: int) -> int:
        """Announce what follows in the line, up to its reach, and put it where it
        belongs then; returns how many.
        """
        if isinstance(line, int):
            job = self._waiting[line]
            if count := self._mark_announced(line, (job,)):
                self._ready.append(job)
            return count
        in_flight = line.in_flight
        most = min(most, max(1, line.reach + 1 - in_flight))
        count = self._mark_announced(
            line, islice(line.queue, line.announced, line.announced + most)
        )
        if not count:
            # it waits for other suspects, for its destination or for its own job in
            # flight
            return 0
        self.ahead += count if in_flight else count - 1
        line.announced += count
        self.go_on(line)
        self.offer(line)
        return count

    def _mark_announced(self, candidate: _Candidate, jobs: Iterable[Job]) -> int:
        """How many could be announced: suspects and capped jobs may have to wait."""
        count = 0
        for job in jobs:
            destination = self._destinations.of(job) if self._capped else None
            if (
                destination is not None
                and isinstance(candidate, Line)
                and not self._may_add(candidate, destination, count)
            ):
                break
            if job.crashes and not self._may_add_suspect(candidate, job, count):
                break
            self.announced.add(job.seq)
            if destination is not None:
                self._destinations.announced(destination)
            count += 1
        return count

    def _may_add(self, line: Line, destination: Destination, chosen: int) -> bool:
        """Whether the line's next job may be announced: nothing of the line is in
        flight, and it is its turn.
        """
        if line.in_flight or chosen:
            return False
        if line is self._in_turn or not self._destinations.must_wait(destination):
            return True
        line.waits_for = destination
        self._destinations.wait(destination, line)
        return False

    def _may_add_suspect(self, candidate: _Candidate, job: Job, chosen: int) -> bool:
        """Whether the suspect may be announced; it counts as such then, and otherwise
        waits for its turn.
        """
        if chosen or (isinstance(candidate, Line) and candidate.in_flight):
            return False
        if job.crashes > 1:
            if self.announced:
                self._loners[candidate] = None
                return False
            self._loner_in_flight = job.seq
        elif len(self._suspects_in_flight) >= SUSPECTS_MAX:
            self._suspects[candidate] = None
            return False
        else:
            self._suspects_in_flight.add(job.seq)
        return True

    def _only_as_head(self, job: Job) -> bool:
        return job.crashes > 0 or (self._capped and self._destinations.is_capped(job))

    def _remove(self, candidate: _Candidate) -> None:
        for waiting in self._all_waiting:
            waiting.pop(candidate, None)
        if isinstance(candidate, Line) and candidate.waits_for is not None:
            self._destinations.leave(candidate.waits_for, candidate)
            candidate.waits_for = None
