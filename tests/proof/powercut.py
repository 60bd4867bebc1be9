"""Power cuts: a disk under the product's SQLite connections that loses unsynced writes.

``FaultyDisk`` is an SQLite VFS. Writes reach the files, so that the server sees them;
the disk also remembers those that are not synced yet. At a chosen operation the power
fails: from then on every operation fails, and each remembered write is, by the seed,
lost, kept, or torn into 512-byte sectors of which some remain. So unsynced writes may
take effect in any order. ``plug_in`` changes the files to what the disk would hold. The
deletion of a file counts as durable.

``power_cut`` runs one seeded workload on the real store until its cut, opens the
remaining files, and counts the acknowledged messages that are missing. ``trouble``
makes the disk fail without a cut: full, or with I/O errors.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import apsw

from holdfast.errors import HoldfastError
from holdfast.message import Acked, Draft, Message, User
from holdfast.store.commands import AddMember, CommandContext, CreateChat
from holdfast.store.sqlite import SqliteSettings, SqliteStore

SECTOR_BYTES = 512
OPERATIONS_MAX = 600
"""The cut is at one of the first writes, truncations and syncs.

About a sixth of these create the schema.
"""
SYNC_FAILURE_ODDS = 0.03
T = TypeVar("T")
USER = User("default", "ann")

_Trouble = Callable[[str, str], None]
"""Called with the operation (``write``, ``sync``, ``truncate``, ``read``) and the path.

It may raise an apsw error.
"""


@dataclass(slots=True)
class _File:
    """The synced content, and the unsynced writes: (offset, data), or (size, None)."""

    durable: bytearray
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)

    def sync(self) -> None:
        for offset, data in self.pending:
            self._apply(offset, data)
        self.pending.clear()

    def lose_power(self, rng: random.Random) -> bytes:
        for offset, data in self.pending:
            fate = rng.choice(("lost", "kept", "torn"))
            if fate == "kept" or (fate == "torn" and data is None):
                self._apply(offset, data)
            elif fate == "torn" and data is not None:
                for start in range(0, len(data), SECTOR_BYTES):
                    if rng.random() < 0.5:
                        self._apply(offset + start, data[start : start + SECTOR_BYTES])
        self.pending.clear()
        return bytes(self.durable)

    def _apply(self, offset: int, data: bytes | None) -> None:
        if data is None:
            del self.durable[offset:]
            return
        if len(self.durable) < offset:
            self.durable.extend(bytes(offset - len(self.durable)))
        self.durable[offset : offset + len(data)] = data


class FaultyDisk(apsw.VFS):
    """One disk, registered with SQLite as ``name`` until ``unregister``.

    Not for more than one process.
    """

    def __init__(
        self,
        name: str,
        rng: random.Random,
        cut_at: int | None = None,
        trouble: _Trouble | None = None,
    ) -> None:
        self.name = name
        self.operations = 0
        self.is_dead = False
        self.trouble = trouble
        self._rng = rng
        self._cut_at = cut_at
        self._files: dict[str, _File] = {}
        super().__init__(name, "")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        self.alive("open", path or "")
        if path is not None and path not in self._files:
            self._files[path] = _File(
                bytearray(Path(path).read_bytes() if Path(path).exists() else b"")
            )
        return _OpenFile(self, name, flags, self._files[path] if path is not None else None)

    def xDelete(self, name: str, syncdir: bool) -> None:
        self.alive("delete", name)
        super().xDelete(name, syncdir)
        self._files.pop(name, None)

    def alive(self, operation: str, path: str) -> None:
        """Fail after the cut, or as ``trouble`` says."""
        if self.is_dead:
            raise apsw.IOError("the power is gone")
        if self.trouble is not None:
            self.trouble(operation, path)

    def count(self) -> None:
        """Count a write, truncation or sync; the last one may still succeed."""
        self.operations += 1
        if self.operations == self._cut_at:
            self.is_dead = True
            raise apsw.IOError("the power is gone")

    @contextmanager
    def until_the_cut(self) -> Iterator[None]:
        """Work on the disk until it fails; then the files are what it would hold."""
        try:
            yield
        except HoldfastError:
            pass
        finally:
            self.plug_in()
            self.unregister()

    def plug_in(self) -> None:
        """Change the files to what the disk would hold. None of them may be open."""
        self.is_dead = True
        for path, file in self._files.items():
            Path(path).write_bytes(file.lose_power(self._rng))
            Path(path + "-shm").unlink(missing_ok=True)  # memory, not disk


class _OpenFile(apsw.VFSFile):
    """One open file of a disk."""

    def __init__(
        self,
        disk: FaultyDisk,
        name: str | apsw.URIFilename | None,
        flags: list[int],
        file: _File | None,
    ) -> None:
        self._disk = disk
        self._file = file or _File(bytearray())
        self._path = name.filename() if isinstance(name, apsw.URIFilename) else name or ""
        super().__init__("", name, flags)

    def xRead(self, amount: int, offset: int) -> bytes:
        self._disk.alive("read", self._path)
        return super().xRead(amount, offset)

    def xWrite(self, data: bytes, offset: int) -> None:
        self._disk.alive("write", self._path)
        self._file.pending.append((offset, bytes(data)))
        self._disk.count()
        super().xWrite(data, offset)

    def xTruncate(self, size: int) -> None:
        self._disk.alive("truncate", self._path)
        self._file.pending.append((size, None))
        self._disk.count()
        super().xTruncate(size)

    def xSync(self, flags: int) -> None:
        """As on Linux, a failed sync drops its writes: readable, never written."""
        try:
            self._disk.alive("sync", self._path)
        except apsw.Error:
            self._file.pending.clear()
            raise
        self._disk.count()
        self._file.sync()


@dataclass(frozen=True, slots=True)
class CutReport:
    """The result of one cut: ``lost`` and ``changed`` acknowledged messages.

    ``unsound`` counts holes, counters that are not the highest sequence, and sends in
    flight at the cut that were not stored exactly once when sent again.
    """

    seed: int
    operation: int
    acked: int
    lost: int
    changed: int
    unsound: int


@dataclass(slots=True)
class _Workload:
    """Seeded sends and joins, in groups, until the cut; remembers the acks.

    It repeats a failed call under its key, as a client would.
    """

    rng: random.Random
    disk: FaultyDisk
    acked: dict[tuple[str, int], Message] = field(default_factory=dict)
    in_flight: list[Draft] = field(default_factory=list)
    numbers: int = 0

    async def run(self, store: SqliteStore) -> None:
        """Ends with the first failure after the cut."""
        for chat in ("chat_a", "chat_b"):
            await self._insist(
                store.change, CreateChat(self._act(), chat, "group", "Team", ["bob"])
            )
        while True:
            if self.rng.random() < 0.1:
                joining = AddMember(self._act(), self._chat(), f"user-{self._number()}")
                changed = await self._insist(store.change, joining)
                if changed.event is not None:
                    self._remember(changed.event)
            self.in_flight = [self._draft() for _ in range(self.rng.choice((1, 1, 3, 9)))]
            await self._insist(self.send, store)

    async def send(self, store: SqliteStore) -> None:
        """Send the messages in flight, for the first time or again."""
        for outcome in await store.append(self.in_flight):
            if not isinstance(outcome, Acked):
                raise outcome
            self._remember(outcome.message)

    async def _insist(self, verb: Callable[[Any], Awaitable[T]], argument: Any) -> T:
        while True:
            try:
                return await verb(argument)
            except HoldfastError:
                if self.disk.is_dead:
                    raise

    def _remember(self, message: Message) -> None:
        self.acked[message.chat_id, message.sequence] = message

    def _number(self) -> int:
        self.numbers += 1
        return self.numbers

    def _chat(self) -> str:
        return self.rng.choice(("chat_a", "chat_b"))

    def _act(self) -> CommandContext:
        number = self._number()
        return CommandContext(
            USER, "2026-01-01T00:00:00.000Z", f"msg_{number}", key=f"key-{number}"
        )

    def _draft(self) -> Draft:
        number = self._number()
        text = f"{number} " + "x" * self.rng.choice((10, 200, 3_000))
        stamp = "2026-01-01T00:00:00.000Z"
        return Draft(
            USER, self._chat(), f"key-{number}", text, "text/plain", f"msg_{number}", stamp
        )


async def power_cut(
    directory: Path, seed: int, synchronous: Literal["FULL", "NORMAL"] = "FULL"
) -> CutReport:
    """Run the store on a disk that loses power, and check what remains in it.

    The directory must be empty. With an odd seed some syncs fail before the cut, and
    their writes are dropped.
    """
    rng = random.Random(seed)
    operation = rng.randint(1, OPERATIONS_MAX)
    disk = FaultyDisk(f"powercut-{seed}", rng, operation)
    failures = random.Random(-seed)

    def fail_some_syncs(operation: str, path: str) -> None:
        if operation == "sync" and failures.random() < SYNC_FAILURE_ODDS:
            raise apsw.IOError("a sync failed")

    path = directory / "chats.db"
    workload = _Workload(rng, disk)
    settings = SqliteSettings(
        synchronous=synchronous, readers=1, checkpoint_pages=rng.choice((4, 16, 4_000))
    )
    with disk.until_the_cut():
        async with SqliteStore(path, settings, vfs=disk.name) as store:
            disk.trouble = fail_some_syncs if seed % 2 and synchronous == "FULL" else None
            await workload.run(store)
    async with SqliteStore(path, settings) as store:
        return await _look(store, workload, seed, operation)


async def _look(store: SqliteStore, workload: _Workload, seed: int, operation: int) -> CutReport:
    """Compare the store with the acks; send those in flight again, and compare."""
    acked = len(workload.acked)
    left, unsound = await _left(store)
    lost = sum(key not in left for key in workload.acked)
    changed = sum(key in left and left[key] != message for key, message in workload.acked.items())
    if len(await store.heads(["chat_a", "chat_b"])) == 2:
        await workload.send(store)
        left, still_unsound = await _left(store)
        keys = [m.client_message_id for m in left.values() if m.client_message_id is not None]
        unsound += (
            still_unsound
            + (len(set(keys)) != len(keys))
            + sum(d.client_message_id not in keys for d in workload.in_flight)
        )
    return CutReport(seed, operation, acked, lost, changed, unsound)


async def _left(store: SqliteStore) -> tuple[dict[tuple[str, int], Message], int]:
    """The stored messages, and the number of unsound chats."""
    left: dict[tuple[str, int], Message] = {}
    unsound = 0
    for chat_id in await store.heads(["chat_a", "chat_b"]):
        page = await store.read_after(chat_id, 0, 10_000, 1 << 30)
        left.update({(chat_id, message.sequence): message for message in page.messages})
        inspection = await store.inspect(chat_id)
        sound = not inspection.gaps and inspection.counter == inspection.highest == inspection.count
        unsound += not sound
    return left, unsound
