"""Backups of a state directory in use: put back whole or not at all."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest
from store_rigs import BOB, acked, create, draft, fill, send

from holdfast import telemetry
from holdfast.clock import Ids, SystemClock
from holdfast.drivers.sqlite.backup import MANIFEST, Manifest, read_manifest, take
from holdfast.drivers.sqlite.file_copy import CopiedFile, Restored, copy_database
from holdfast.drivers.sqlite.restore import restore
from holdfast.errors import HoldfastError, ServerBusy, StateCorrupted, StateDirectory, Unavailable
from holdfast.limits.rule_changes import Change
from holdfast.limits.rules import RuleName
from holdfast.limits.rulestore.sqlite import SqliteRuleStore
from holdfast.message import Watermark
from holdfast.node.backup import CONTENTS, Backups, require_whole, restore_backup
from holdfast.node.state_dir import held
from holdfast.store.sqlite import SqliteStore
from holdfast.streaming.reply import ReplyBegin
from holdfast.streaming.reply_log.sqlite import RepliesFile, SqliteReplyLog, SqliteUsage
from holdfast.streaming.usage_store.contract import RunUsage, UsageKey, UsageQuery
from holdfast.webhooks.contract import WebhookEndpoint
from holdfast.webhooks.sqlite import SqliteEndpoints
from holdfast.work.contract import ReaderMark
from holdfast.work.job import JobDraft
from holdfast.work.sqlite import SqliteWork

AT = "2026-01-01T00:00:00.000Z"
LATER = Restored("2026-01-02T00:00:00.000Z", 1_000, "op", "a drill", "backup-1")
FILES = {"work.db", "webhooks.db", "limits.db", "replies.db", "chats.db", "keys.json", MANIFEST}
USAGE_KEY = UsageKey("2026-01-01", "acme", "bob", "m", "p")
ALL_USAGE = UsageQuery("2000-01-01", "2099-01-01")


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where that is to be had: processes are killed here, no power is cut,
    and syncs would take the time.
    """
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        yield Path(place)


class Parts:
    """Every file of a state directory, open."""

    def __init__(self, chats: SqliteStore, work: SqliteWork, rules: SqliteRuleStore) -> None:
        self.chats, self.work, self.rules = chats, work, rules


@asynccontextmanager
async def opened(state: Path) -> AsyncIterator[Parts]:
    clock = SystemClock()
    async with (
        SqliteStore(state / "chats.db") as chats,
        SqliteRuleStore(state / "limits.db", clock) as rules,
    ):
        work = await SqliteWork.open(state / "work.db", clock)
        try:
            yield Parts(chats, work, rules)
        finally:
            await work.close()


async def read_all(parts: Any) -> ReaderMark:
    """The mark of a reader that has read the whole log."""
    end, before = await parts.chats.log_end(), await parts.work.reader_offset("webhooks")
    return ReaderMark("webhooks", 0, end, before)


async def _fill(state: Path, messages: int) -> None:
    async with opened(state) as parts:
        await create(parts.chats, "bob")
        await create(parts.chats, chat_id="chat_b")
        await fill(parts.chats, messages)
        await parts.chats.mark([Watermark(BOB, "phone", "chat_a", 1, messages, messages - 1)])
        await parts.work.enqueue([JobDraft("mail", b"{}")], [await read_all(parts)])
        body = {"algorithm": "token_bucket", "limit": messages, "window": "60s"}
        await parts.rules.change(
            Change("create", RuleName("acme", "/x"), "op", AT, body, reason="test")
        )
    endpoints = await SqliteEndpoints.open(state / "webhooks.db")
    await endpoints.add(
        WebhookEndpoint("hook_1", "acme", "https://example.com", "whsec_x", "", AT, "")
    )
    await endpoints.close()
    async with replies_of(state) as (log, usage):
        begin = ReplyBegin("acme", "user", "bob", "native", "native", "m", "n", 1.0)
        await log.begin("reply_1", begin)
        await usage.count([RunUsage("run_1", USAGE_KEY, messages, 2 * messages, False)])


@asynccontextmanager
async def replies_of(state: Path) -> AsyncIterator[tuple[SqliteReplyLog, SqliteUsage]]:
    file = await RepliesFile.open(state / "replies.db", SystemClock())
    yield SqliteReplyLog(file), SqliteUsage(file)
    await file.close()


@cache
def _template(messages: int) -> Path:
    state = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, state)
    asyncio.run(_fill(state, messages))
    (state / "keys.json").write_text(f'["keys of {messages}"]')
    (state / "secrets.json").write_text("{}")
    return state


def make_state(state: Path, messages: int) -> Path:
    """A state directory with something in every file; each is made once."""
    return Path(shutil.copytree(_template(messages), state))


def back_up(state: Path, name: str = "backup-1") -> Path:
    folder = state / "backups" / name
    take(state, folder, CONTENTS, at=AT, program="test")
    return folder


def put_back(
    state: Path, backup: Path, *, overwrite: bool = True, restored: Restored = LATER
) -> Manifest:
    state.mkdir(exist_ok=True)
    with held(state):
        return restore(state, backup, CONTENTS, restored, overwrite=overwrite)


def look(state: Path) -> dict[str, Any]:
    """What a server that starts on the directory would find, in every file of it."""

    async def tokens() -> int:
        async with replies_of(state) as (_, usage):
            return sum(row.prompt_tokens for row in await usage.rows(ALL_USAGE))

    async def read() -> dict[str, Any]:
        async with opened(state) as parts:
            inspection = await parts.chats.inspect("chat_a")
            assert (
                inspection.counter == inspection.highest == inspection.count and not inspection.gaps
            )
            rule = await parts.rules.get(RuleName("acme", "/x"))
            return {
                "messages": inspection.count,
                "epoch": inspection.chat.epoch,
                "marks": [
                    (mark.delivered, mark.read) for mark in await parts.chats.watermarks("chat_a")
                ],
                "log_end": await parts.chats.log_end(),
                "read_through": await parts.work.reader_offset("webhooks"),
                "jobs": sum((await parts.work.stats()).by_state.values()),
                "limit": rule.limit if rule else None,
                "rules_epoch": (await parts.rules.head()).epoch,
                "tokens": await tokens(),
                "acts": [
                    (r.action, r.actor, r.reason)
                    for r in (await parts.chats.audit(None, 10)).records
                ],
            }

    with held(state):
        return asyncio.run(read())


@contextmanager
def reaching(reached: Callable[[str], None]) -> Iterator[None]:
    stop = telemetry.on_mark(reached)
    try:
        yield
    finally:
        stop()


def killed_at(point: str, work: Callable[[], object]) -> bool:
    """Whether a child doing ``work``, killed at ``point``, came that far."""
    pid = os.fork()
    if pid == 0:
        telemetry.on_mark(
            lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == point else None
        )
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_backup_holds_every_file_but_the_secrets_and_a_restore_brings_them_back(
    tmp_path: Path,
) -> None:
    state = make_state(tmp_path / "state", 7)
    backup = back_up(state)
    assert {file.name for file in backup.iterdir()} == FILES
    assert stat.S_IMODE(backup.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in backup.iterdir())
    manifest = read_manifest(backup)
    counts = {file.name: file.counts for file in manifest.files}
    assert counts["chats.db"] == {"chats": 2, "messages": 7, "log_end": 9}
    assert counts["work.db"] == {"jobs": 1, "dead": 0, "read_through": 9}
    assert counts["webhooks.db"] == {"endpoints": 1} and counts["limits.db"]["rules"] == 1
    assert counts["replies.db"] == {"replies": 1, "usage": 1}
    assert (manifest.taken_at, manifest.holdfast) == (AT, "test")

    fresh = tmp_path / "fresh"
    restored = put_back(fresh, backup, overwrite=False)
    assert {file.name for file in restored.files} == FILES - {MANIFEST}
    assert (fresh / "keys.json").read_text() == '["keys of 7"]'
    assert {entry.name for entry in fresh.iterdir()} == FILES - {MANIFEST} | {"lock"}
    found = look(fresh)
    assert (found["messages"], found["jobs"], found["limit"], found["read_through"]) == (7, 1, 7, 9)
    assert found["marks"] == [(7, 6)], "what was read stays read in the new epoch"
    assert found["epoch"] >= 1_000 and found["rules_epoch"] >= 1_000
    assert found["acts"] == [("store.restore", "op", "a drill")]


def test_the_same_backup_restored_twice_never_gives_an_epoch_twice(tmp_path: Path) -> None:
    backup = back_up(make_state(tmp_path / "state", 3))
    epochs = []
    for n, moment in enumerate((1_000, 1_001)):
        put_back(
            tmp_path / f"fresh{n}", backup, restored=Restored(AT, moment, "op", "", "backup-1")
        )
        found = look(tmp_path / f"fresh{n}")
        epochs.append((found["epoch"], found["rules_epoch"]))
    assert epochs[0][0] < epochs[1][0] and epochs[0][1] < epochs[1][1]


def test_a_backup_taken_while_everything_is_written_is_whole(tmp_path: Path) -> None:
    state = make_state(tmp_path / "state", 500)
    backup = state / "backups" / "one"
    steps: list[str] = []

    async def serve() -> int:
        async with opened(state) as parts:
            await parts.chats.append([draft(f"big-{n}", "x" * 4_000) for n in range(1_000)])
            taking = asyncio.create_task(
                asyncio.to_thread(
                    take,
                    state,
                    backup,
                    CONTENTS,
                    at=AT,
                    program="",
                    progress=lambda what, *_: steps.append(what),
                )
            )
            during = 0
            while not taking.done():
                acked(await send(parts.chats, f"during-{during}"))
                await parts.work.enqueue(
                    [JobDraft("mail", b"{}")],
                    [await read_all(parts)],
                )
                during += 1
            await taking
            return during

    during = asyncio.run(serve())
    assert during > 3 and steps.count("copying chats.db") > 3 and steps[-1] == "checking keys.json"
    put_back(tmp_path / "fresh", backup)
    found = look(tmp_path / "fresh")
    assert 1_500 <= found["messages"] <= 1_500 + during
    assert found["read_through"] <= found["log_end"]


def test_jobs_lag_behind_the_chats_they_are_made_of_and_never_run_ahead(tmp_path: Path) -> None:
    """A commit between the copies of two files is made into jobs again."""
    state = make_state(tmp_path / "state", 5)

    async def serve() -> None:
        async with opened(state) as parts:
            loop = asyncio.get_running_loop()

            async def more() -> None:
                acked(await send(parts.chats, "in between"))
                await parts.work.enqueue(
                    [JobDraft("mail", b"{}")],
                    [await read_all(parts)],
                )

            def reached(point: str) -> None:
                if point in ("backup.work.db", "backup.chats.db"):
                    asyncio.run_coroutine_threadsafe(more(), loop).result(10)

            with reaching(reached):
                await asyncio.to_thread(back_up, state)

    asyncio.run(serve())
    put_back(tmp_path / "fresh", state / "backups" / "backup-1")
    found = look(tmp_path / "fresh")
    assert (found["read_through"], found["log_end"]) == (7, 8)


def test_a_file_that_is_not_there_is_not_missed(tmp_path: Path) -> None:
    state = make_state(tmp_path / "state", 2)
    (state / "work.db").unlink()
    put_back(tmp_path / "fresh", back_up(state))
    assert not (tmp_path / "fresh" / "work.db").exists()


def test_what_is_replaced_is_moved_aside_and_what_gives_access_stays(tmp_path: Path) -> None:
    backup = back_up(make_state(tmp_path / "old", 2))
    state = make_state(tmp_path / "state", 9)
    (state / "rules.json").write_text("{}")
    with pytest.raises(StateDirectory, match=r"not empty \(work.db, .*--overwrite"):
        put_back(state, backup, overwrite=False)
    assert look(state)["messages"] == 9
    put_back(state, backup)
    assert look(state)["messages"] == 2 and look(state)["limit"] == 2
    assert (state / "keys.json").read_text() == '["keys of 9"]', (
        "a revoked key must not come back with the messages"
    )
    assert not (state / "rules.json").exists()
    [aside] = state.glob("before-restore-*")
    assert (aside / "rules.json").exists()
    shutil.copytree(aside, tmp_path / "undone")
    assert look(tmp_path / "undone")["messages"] == 9
    put_back(state, backup)
    assert len(list(state.glob("before-restore-*"))) == 2, "also in the same moment"


def test_a_write_ahead_log_of_the_old_state_is_not_applied_to_the_new(tmp_path: Path) -> None:
    backup = back_up(make_state(tmp_path / "old", 2))
    state = make_state(tmp_path / "state", 4)
    crashed = apsw.Connection(str(state / "chats.db"))
    crashed.execute("UPDATE chats SET name = 'not yet in the file itself'")
    for suffix in ("", "-wal", "-shm"):
        shutil.copy(state / f"chats.db{suffix}", tmp_path / f"chats.db{suffix}")
    crashed.close()
    for suffix in ("", "-wal", "-shm"):
        shutil.copy(tmp_path / f"chats.db{suffix}", state / f"chats.db{suffix}")
    put_back(state, backup)
    assert look(state)["messages"] == 2


def flip(path: Path, at: float = 0.5) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= 0xFF
    path.write_bytes(content)


def rewrite(backup: Path, seal: bool = True, **changes: Any) -> None:
    manifest = Manifest(
        **{name: getattr(read_manifest(backup), name) for name in Manifest.__struct_fields__}
        | changes
    )
    (backup / MANIFEST).write_bytes(msgspec.json.encode(manifest.sealed() if seal else manifest))


def newer_schema(backup: Path) -> None:
    connection = apsw.Connection(str(backup / "chats.db"))
    connection.execute("INSERT INTO schema_version VALUES (99)")
    connection.close()


WRONG: dict[str, tuple[Callable[[Path], object], type[HoldfastError], str]] = {
    "nothing there": (shutil.rmtree, StateDirectory, "there is no backup"),
    "no manifest": (
        lambda b: (b / MANIFEST).unlink(),
        StateDirectory,
        "is not a backup: it has no manifest",
    ),
    "another's": (
        lambda b: (b / MANIFEST).write_text('{"format": "tar", "version": 1}'),
        StateDirectory,
        "says 'tar'",
    ),
    "no JSON": (lambda b: (b / MANIFEST).write_text("?"), StateCorrupted, "not a manifest"),
    "half a manifest": (
        lambda b: (b / MANIFEST).write_text('{"format": "holdfast-backup", "version": 1}'),
        StateCorrupted,
        "damaged",
    ),
    "a newer format": (
        lambda b: rewrite(b, version=2),
        StateCorrupted,
        "newer Holdfast.*restore it with that one",
    ),
    "a touched manifest": (
        lambda b: rewrite(b, seal=False, taken_at="never"),
        StateCorrupted,
        "digest",
    ),
    "a file lost": (lambda b: (b / "limits.db").unlink(), StateCorrupted, "lacks limits.db"),
    "an unknown file": (
        lambda b: ((b / "new.db").touch(), rewrite(b, files=(CopiedFile("new.db", 0, ""),))),
        StateCorrupted,
        "new.db",
    ),
    "made without the chats": (
        lambda b: rewrite(
            b, files=tuple(f for f in read_manifest(b).files if f.name != "chats.db")
        ),
        StateCorrupted,
        "made without chats.db; use another backup",
    ),
    "one bit of the chats": (
        lambda b: flip(b / "chats.db"),
        StateCorrupted,
        "chats.db is (damaged|not what)",
    ),
    "one bit of the jobs": (
        lambda b: flip(b / "work.db"),
        StateCorrupted,
        "work.db is (damaged|not what)",
    ),
    "one bit of the keys": (
        lambda b: flip(b / "keys.json"),
        StateCorrupted,
        "keys.json is not what its manifest says",
    ),
    "no database any more": (lambda b: flip(b / "chats.db", 0), StateCorrupted, "damaged"),
    "a newer schema": (newer_schema, StateCorrupted, "newer Holdfast"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_backup_that_cannot_be_trusted_changes_nothing(wrong: str, tmp_path: Path) -> None:
    backup = back_up(make_state(tmp_path / "old", 2))
    state = make_state(tmp_path / "state", 5)
    (state / "keys.json").unlink()
    spoil, error, words = WRONG[wrong]
    spoil(backup)
    before = {entry.name for entry in state.iterdir()}
    with pytest.raises(error, match=words):
        put_back(state, backup)
    assert {entry.name for entry in state.iterdir()} == before | {"lock"}
    assert look(state)["messages"] == 5


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda s: (s / "chats.db").unlink(),
            r"chats.db is gone, but limits.db, work.db, webhooks.db beside it is not",
        ),
        (lambda s: (s / "chats.db").write_bytes(b""), "chats.db is empty"),
        (lambda s: (s / "work.db").write_bytes(b""), "work.db is empty, but webhooks.db"),
    ],
)
def test_lost_file_is_not_silently_made_again(
    spoil: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    state = make_state(tmp_path / "state", 2)
    require_whole(state)
    spoil(state)
    with pytest.raises(StateCorrupted, match=rf"{words}.*holdfast restore"):
        require_whole(state)


def test_a_first_start_that_was_killed_can_be_started_again(tmp_path: Path) -> None:
    require_whole(tmp_path)
    for name in ("chats.db", "limits.db", "work.db", "webhooks.db"):
        (tmp_path / name).touch()
        require_whole(tmp_path)
        (tmp_path / name).write_bytes(b"made")
        require_whole(tmp_path)
    (tmp_path / "limits.db").unlink()
    require_whole(tmp_path)  # its rules are in PostgreSQL


def test_a_damaged_file_is_not_backed_up_and_is_named(tmp_path: Path) -> None:
    state = make_state(tmp_path / "state", 800)
    with (state / "chats.db").open("r+b") as file:
        file.seek(4096 * 20)
        file.write(os.urandom(4096 * 3))
    with pytest.raises(
        StateCorrupted, match=r"no backup was taken, because .*state/chats.db is damaged"
    ):
        back_up(state)
    assert not list((state / "backups").iterdir())


def test_there_is_no_backup_without_the_messages(tmp_path: Path) -> None:
    state = make_state(tmp_path / "state", 2)
    (state / "chats.db").unlink()
    with pytest.raises(
        StateCorrupted, match=r"no backup was taken, because .*state/chats.db is gone"
    ):
        back_up(state)
    assert not list((state / "backups").iterdir())


def test_a_running_server_is_not_restored_over(tmp_path: Path) -> None:
    backup = back_up(make_state(tmp_path / "old", 2))
    with (
        held(tmp_path / "old"),
        pytest.raises(StateDirectory, match=f"in use by process {os.getpid()}; stop it"),
    ):
        restore_backup(tmp_path / "old", backup, overwrite=True)


def test_a_backup_of_the_chats_alone_from_an_older_version_can_be_restored(tmp_path: Path) -> None:
    state = make_state(tmp_path / "state", 6)
    copy_database(state / "chats.db", tmp_path / "chats-01J9ZK.db")
    put_back(state, tmp_path / "chats-01J9ZK.db")
    assert not (state / "work.db").exists(), "its place in the log would be another's"
    found = look(state)
    assert (found["messages"], found["read_through"], found["limit"]) == (6, None, None)
    (tmp_path / "notes.txt").write_text("no backup")
    with pytest.raises(StateCorrupted, match=r"not a backup.*holdfast backup"):
        put_back(tmp_path / "fresh", tmp_path / "notes.txt")
    with (tmp_path / "chats-01J9ZK.db").open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(4096))
    with pytest.raises(StateCorrupted, match="damaged"):
        put_back(tmp_path / "fresh", tmp_path / "chats-01J9ZK.db")


RESTORE_POINTS = [
    "restore.made.work.db",
    "restore.made.chats.db",
    "restore.made",
    "restore.ready",
    "restore.aside.work.db",
    "restore.placed.work.db",
    "restore.aside.chats.db-wal",
    "restore.aside.chats.db",
    "restore.placed.chats.db",
    "restore.aside.rules.json",
    "restore.placed.keys.json",
]


@pytest.mark.parametrize("point", RESTORE_POINTS)
def test_a_restore_killed_anywhere_is_done_or_not_done(point: str, tmp_path: Path) -> None:
    """The next process completes it from ``ready`` on; before, nothing changed."""
    backup = back_up(make_state(tmp_path / "old", 2))
    state = make_state(tmp_path / "state", 8)
    (state / "keys.json").unlink()
    (state / "rules.json").write_text("{}")
    assert killed_at(point, lambda: put_back(state, backup))
    found = look(state)
    done = RESTORE_POINTS.index(point) >= RESTORE_POINTS.index("restore.ready")
    expected = 2 if done else 8
    assert (found["messages"], found["limit"], found["read_through"]) == (
        expected,
        expected,
        expected + 2,
    ), "two chats were created in the log besides"
    assert (found["epoch"] > 1) == done and (state / "keys.json").exists() == done
    assert not (state / "restore.ready").exists()
    put_back(state, backup)
    assert look(state)["messages"] == 2 and not list(state.glob("restore.*"))


@pytest.mark.parametrize("point", ["backup.work.db", "backup.chats.db", "backup.complete"])
def test_a_backup_killed_anywhere_leaves_nothing_that_looks_like_one(
    point: str, tmp_path: Path
) -> None:
    state = make_state(tmp_path / "state", 2)
    assert killed_at(point, lambda: back_up(state))
    [left] = (state / "backups").iterdir()
    assert left.name == "backup-1.partial"
    back_up(state, "backup-2")
    assert [entry.name for entry in (state / "backups").iterdir()] == ["backup-2"]
    with pytest.raises(StateDirectory, match="exists"):
        back_up(state, "backup-2")


def test_a_full_disk_ends_a_backup_and_a_restore_and_leaves_everything_as_it_was(
    small_disk: Path, tmp_path: Path
) -> None:
    backup = back_up(make_state(tmp_path / "old", 3_000))
    state = make_state(small_disk / "state", 800)
    with (small_disk / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
        while shutil.disk_usage(small_disk).free > 256 * 1024:
            ballast.write(bytes(4096))
    for attempt in (lambda: back_up(state), lambda: put_back(state, backup)):
        with pytest.raises(StateDirectory, match=r"full|No space left"):
            attempt()
        assert not list(state.glob("restore.*")) and not list(state.glob("backups/*"))
    (small_disk / "ballast").unlink()
    assert look(state)["messages"] == 800


async def test_one_backup_is_taken_at_a_time_and_shows_how_far_it_is(tmp_path: Path) -> None:
    state = await asyncio.to_thread(make_state, tmp_path / "state", 3)
    clock = SystemClock()
    backups = Backups(state, clock, Ids(clock))
    seen: list[Any] = []
    with reaching(lambda point: seen.append(backups.step)):
        first = asyncio.create_task(backups.take())
        await asyncio.sleep(0)
        with pytest.raises(ServerBusy, match="a backup is being taken"):
            await backups.take()
        taken = await first
    assert backups.step is None and seen[0].doing == "checking work.db"
    assert seen[0].done_bytes == seen[0].total_bytes > 0
    assert read_manifest(Path(taken.path)).files == taken.files
    backups.stop()
    with pytest.raises(Unavailable, match="stopping"):
        await backups.take()
    assert backups.step is None and len(list((state / "backups").iterdir())) == 1


def test_backup_goes_on_when_its_caller_disconnects(tmp_path: Path) -> None:
    state = make_state(tmp_path / "state", 3)

    async def scenario() -> None:
        clock = SystemClock()
        backups = Backups(state, clock, Ids(clock))
        task = asyncio.create_task(backups.take())
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(scenario())  # which waits for its threads
    assert (
        json.loads(next(state.glob("backups/*/manifest.json")).read_text())["format"]
        == "holdfast-backup"
    )


def test_restored_replies_are_gone_and_usage_is_not(tmp_path: Path) -> None:
    """Clients may have read more of a reply than the backup has."""
    state = make_state(tmp_path / "state", 7)
    put_back(state, back_up(state))

    async def read() -> None:
        async with replies_of(state) as (log, usage):
            assert await log.read("reply_1", None, 10) is None
            assert [row.prompt_tokens for row in await usage.rows(ALL_USAGE)] == [7]

    asyncio.run(read())
