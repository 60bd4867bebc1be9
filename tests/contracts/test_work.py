"""One behaviour of every job store: retries, blocks, dead letters, inbox, takeover."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import apsw
import asyncpg
import pytest
from work_rigs import (
    WORK_STORES,
    ManualWorker,
    Opener,
    draft,
    embedded_work,
    opener_of,
    postgres_work,
    steps_of,
)

from engines import Server, postgres
from holdfast.errors import NotFound, Unavailable, VersionConflict
from holdfast.work.contract import (
    Child,
    ClaimRequest,
    Failed,
    JobGone,
    LeaseLost,
    ReaderMark,
    Report,
)
from holdfast.work.inspection import Query
from holdfast.work.job import (
    Failure,
    FailureAction,
    FailureVerdict,
    JobDraft,
    OnFailure,
    Policies,
    Reason,
    Stage,
    State,
)
from holdfast.work.postgres.session import SQL as POSTGRES
from holdfast.work.sqlite.verbs import SQL as SQLITE


@pytest.fixture(params=WORK_STORES)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    return opener_of(request, tmp_path)


async def test_jobs_are_claimed_in_order_and_completed_jobs_are_gone(opened: Opener) -> None:
    async with opened() as o:
        seqs = await o.store.enqueue([draft("a"), draft("b"), draft(None), draft("a")])
        assert seqs == sorted(seqs)
        manual = await ManualWorker.join(o.store)
        assert await manual.turn() == seqs
        assert manual.jobs[seqs[0]].attempt == 1
        assert manual.jobs[seqs[0]].stages == Stage.STORED
        assert await manual.turn(completed=seqs) == []
        assert await o.store.find(Query()) == []


async def test_claimed_job_is_not_claimed_again_until_a_rewind(opened: Opener) -> None:
    async with opened() as o:
        seqs = await o.store.enqueue([draft() for _ in range(5)])
        manual = await ManualWorker.join(o.store)
        assert await manual.turn(want=3) == seqs[:3]
        assert await manual.turn() == seqs[3:]
        assert await manual.turn() == []
        await manual.rewind()
        assert await manual.turn(completed=seqs[:1]) == seqs[1:]


async def test_claim_reports_how_far_ready_jobs_have_been_read(opened: Opener) -> None:
    async with opened() as o:
        seqs = await o.store.enqueue([draft() for _ in range(5)])
        manual = await ManualWorker.join(o.store)
        assert (await manual.call(2)).through == seqs[1]
        await manual.turn(0)
        assert (await manual.call(1)).through == seqs[2]
        assert (await manual.call(10)).through >= seqs[4], "to the end"
        await manual.rewind()
        assert (await manual.call(1)).through == seqs[0]


async def test_claim_is_bounded_in_bytes_but_never_empty(opened: Opener) -> None:
    async with opened() as o:
        seqs = await o.store.enqueue([draft(None, payload=b"x" * 1000) for _ in range(6)])
        manual = await ManualWorker.join(o.store)
        first = await manual.session.process(Report(), ClaimRequest(jobs=10, bytes_max=2500))
        assert [job.seq for job in first.jobs] == seqs[:3]
        second = await manual.session.process(Report(), ClaimRequest(jobs=10, bytes_max=1))
        assert [job.seq for job in second.jobs] == seqs[3:4]
        third = await manual.session.process(Report(), ClaimRequest(jobs=10, bytes_max=0))
        assert [job.seq for job in third.jobs] == seqs[4:5]
        assert await manual.turn() == seqs[5:], "nothing is read past"


async def test_due_and_held_jobs_are_bounded_in_bytes_too(opened: Opener) -> None:
    async with opened() as o:
        seqs = await o.store.enqueue([draft(f"s{n}", payload=b"x" * 1000) for n in range(5)])
        held = await o.store.enqueue([draft("deep", payload=b"x" * 1000) for _ in range(5)])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        await manual.turn(failed=[manual.failure(seq) for seq in seqs], held=held)
        some = ClaimRequest(jobs=10, bytes_max=2500, backlogs={"deep": 0})
        assert [job.seq for job in (await manual.session.process(Report(), some)).backlog] == held[
            :3
        ]
        rest = ClaimRequest(jobs=10, bytes_max=2500, backlogs={"deep": held[2]})
        assert [job.seq for job in (await manual.session.process(Report(), rest)).backlog] == held[
            3:
        ]
        await o.pass_time(100)
        bounded = ClaimRequest(jobs=10, bytes_max=2500)
        assert len((await manual.session.process(Report(), bounded)).jobs) == 3
        assert len((await manual.session.process(Report(), bounded)).jobs) == 2


@pytest.mark.covers("003 ProcessWorkBatch_FailsOutboxMessages_MarksAsFailedWithErrorAsync")
async def test_process_work_batch_fails_outbox_messages_marks_as_failed_with_error(
    opened: Opener,
) -> None:
    async with opened() as o:
        (m1,) = await o.store.enqueue([draft()])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        failure = manual.failure(
            m1, Reason.TRANSPORT_UNAVAILABLE, stages=int(Stage.STORED), error="Network timeout"
        )
        assert await manual.turn(failed=[failure]) == []
        (entry,) = await o.store.find(Query())
        assert (entry.state, entry.attempt, entry.error) == (State.RETRY, 1, "Network timeout")
        assert (entry.reason, entry.error_type) == (Reason.TRANSPORT_UNAVAILABLE, "ValueError")
        assert (entry.trace, entry.fingerprint) == ("trace", "print")
        await o.pass_time(50)  # and what this test takes
        assert await manual.turn() == []
        await o.pass_time(10)
        assert await manual.turn() == [m1]
        assert manual.jobs[m1].attempt == 2
        assert await manual.turn(completed=[m1]) == []
        assert await o.store.find(Query()) == []
        assert await o.store.streams() == []


@pytest.mark.covers("003 ProcessWorkBatch_ScheduledRetry_BlocksLaterMessagesInStreamAsync")
async def test_process_work_batch_scheduled_retry_blocks_later_messages_in_stream(
    opened: Opener,
) -> None:
    async with opened() as o:
        m1, m2, other = await o.store.enqueue([draft(), draft(), draft("other")])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        await manual.turn(failed=[manual.failure(m1)], held=[m2], completed=[other])
        (blocked,) = await o.store.streams()
        assert (blocked.block.stream, blocked.block.head, blocked.waiting) == ("s", m1, 1)
        blocks = await manual.rewind()
        assert [block.head for block in blocks] == [m1]
        assert await manual.turn() == [], "neither the head nor what it holds may come"


@pytest.mark.covers("003 ProcessWorkBatch_ScheduledRetryExpires_UnblocksStreamAsync")
async def test_process_work_batch_scheduled_retry_expires_unblocks_stream(opened: Opener) -> None:
    async with opened() as o:
        m1, m2, m3 = await o.store.enqueue([draft(), draft(), draft()])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        claimed = await manual.call(failed=[manual.failure(m1)], held=[m2, m3])
        assert claimed.next_due_seconds is not None and 58 < claimed.next_due_seconds <= 60
        await o.pass_time(61)
        assert await manual.turn() == [m1]
        assert await manual.turn(completed=[m1], backlogs={"s": 0}) == [m2, m3]
        assert await o.store.streams() == []


@pytest.mark.covers(
    "003 ProcessWorkBatch_StreamBasedFailureCascade_ReleasesLaterMessagesInSameStreamAsync"
)
async def test_process_work_batch_failure_cascade_releases_later_messages_in_stream(
    opened: Opener,
) -> None:
    async with opened() as o:
        m1, m2, m3, m4 = await o.store.enqueue([draft() for _ in range(4)])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        await manual.turn(failed=[manual.failure(m1)], held=[m2, m3, m4])
        claimed = await manual.call(released=[m2, m3])
        assert claimed.notice, "what was released is read by a rewind"
        (block,) = await manual.rewind()
        assert block.released_ids == {m2, m3}
        assert await manual.turn() == [m2, m3]
        (head,) = await o.store.find(Query(seqs=[m1]))
        assert head.state is State.RETRY
        await o.pass_time(61)
        assert await manual.turn(completed=[m2, m3]) == [m1]
        assert await manual.turn(completed=[m1], backlogs={"s": 0}) == [m4]


@pytest.mark.covers("003 matrix: failed and scheduled, not released")
async def test_matrix_failed_and_scheduled_without_release_blocks(opened: Opener) -> None:
    async with opened() as o:
        m1, m2 = await o.store.enqueue([draft(), draft()])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        await manual.turn(failed=[manual.failure(m1)], held=[m2])
        await manual.rewind()
        assert await manual.turn() == []


@pytest.mark.covers("003 matrix: failed and scheduled, released")
async def test_matrix_failed_and_scheduled_with_release_continues_without_m1(
    opened: Opener,
) -> None:
    async with opened() as o:
        m1, m2 = await o.store.enqueue([draft(), draft()])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        await manual.turn(failed=[manual.failure(m1)], held=[m2])
        await o.store.release("s", ids=[m2], by="ann", why="independent")
        assert (await manual.call()).notice
        await manual.rewind()
        assert await manual.turn() == [m2]


@pytest.mark.covers("003 matrix: failed, not scheduled, released")
async def test_matrix_failed_and_not_scheduled_with_release_continues(opened: Opener) -> None:
    async with opened() as o:
        m1, m2 = await o.store.enqueue([draft(), draft()])
        manual = await ManualWorker.join(
            o.store, policies=Policies().with_type("order", stream=OnFailure.PARK)
        )
        await manual.turn()
        await manual.turn(failed=[manual.failure(m1)], held=[m2])
        (head,) = await o.store.find(Query(seqs=[m1]))
        assert (head.state, head.due_at) == (State.PARKED, None)
        await o.store.release("s", through=m2, by="ann", why="m1 is poison")
        await manual.call()
        await manual.rewind()
        assert await manual.turn() == [m2]
        await o.pass_time(1e6)
        assert await manual.turn(completed=[m2]) == [], "a parked job never runs by itself"


@pytest.mark.covers("003 matrix: processing")
async def test_matrix_processing_blocks_for_every_other_worker(opened: Opener) -> None:
    async with opened() as o:
        m1, _ = await o.store.enqueue([draft(), draft()])
        first = await ManualWorker.join(o.store)
        assert await first.turn(want=1) == [m1]
        if o.store.shared:
            second = await ManualWorker.join(o.store, "second")
            assert await second.turn() == [], "a stream has one owner"
            await second.session.leave()


@pytest.mark.covers("003 matrix: completed")
async def test_matrix_completed_continues_the_stream(opened: Opener) -> None:
    async with opened() as o:
        m1, m2 = await o.store.enqueue([draft(), draft()])
        manual = await ManualWorker.join(o.store)
        assert await manual.turn(want=1) == [m1]
        assert await manual.turn(completed=[m1]) == [m2]


@pytest.mark.covers("003 use case: release M3, keep M2")
async def test_release_by_type_lets_only_that_type_pass_later_jobs_too(opened: Opener) -> None:
    async with opened() as o:
        m1, m2, m3 = await o.store.enqueue([draft(), draft(type="mail"), draft()])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        await manual.turn(failed=[manual.failure(m1)], held=[m2, m3])
        await o.store.release("s", type="mail", by="ann", why="mails are independent")
        await manual.call()
        (block,) = await manual.rewind()
        assert await manual.turn() == [m2]
        assert not block.holds(m3 + 100, "mail")
        assert block.holds(m3, "order")
        (act,) = await o.store.acts()
        assert (act.verb, act.by, act.why) == ("release", "ann", "mails are independent")


async def test_later_failure_makes_a_new_block(opened: Opener) -> None:
    async with opened() as o:
        m1, m2, m3 = await o.store.enqueue([draft(), draft(), draft()])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        await manual.turn(failed=[manual.failure(m1)], held=[m2, m3])
        await manual.call(released=[m2, m3])
        await manual.rewind()
        assert await manual.turn() == [m2, m3]
        await manual.turn(failed=[manual.failure(m2)], held=[m3])
        await manual.rewind()
        assert await manual.turn() == [], "m3 waits behind the new block"
        assert [blocked.block.head for blocked in await o.store.streams()] == [m1, m2]


async def test_release_of_a_stream_without_block_is_refused(opened: Opener) -> None:
    async with opened() as o:
        await o.store.enqueue([draft()])
        with pytest.raises(NotFound, match="not blocked"):
            await o.store.release("s", ids=[1], by="ann", why="?")
        assert await o.store.acts() == []


@pytest.mark.covers("003 block all, continue, or cascade release")
async def test_skip_continues_the_stream_and_retries_the_head_out_of_order(opened: Opener) -> None:
    async with opened() as o:
        m1, m2 = await o.store.enqueue([draft(), draft()])
        manual = await ManualWorker.join(
            o.store, policies=Policies.preset("uniform").with_type("order", stream=OnFailure.SKIP)
        )
        await manual.turn()
        await manual.turn(failed=[manual.failure(m1)], completed=[m2])
        assert await o.store.streams() == []
        await o.pass_time(61)
        assert await manual.turn() == [m1]


@pytest.mark.covers("003 PoisonMessage = 7")
async def test_poison_becomes_a_complete_dead_letter_and_lifts_the_block(
    opened: Opener,
) -> None:
    async with opened() as o:
        m1, m2 = await o.store.enqueue([draft(), draft()])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        await manual.turn(failed=[manual.failure(m1)], held=[m2])
        for _ in range(8):
            await o.pass_time(1e6)
            assert await manual.turn() == [m1]
            await manual.turn(failed=[manual.failure(m1)])
        await o.pass_time(1e6)
        assert await manual.turn() == [m1]
        assert await manual.turn(
            failed=[manual.failure(m1, error="the tenth")], backlogs={"s": 0}
        ) == [m2]
        (dead,) = await o.store.dead(Query())
        assert (dead.seq, dead.attempt, dead.strikes) == (m1, 10, 10)
        assert (dead.reason, dead.error) == (Reason.POISON_MESSAGE, "the tenth")
        assert await o.store.streams() == []


@pytest.mark.covers("003 ValidationFailure = 3")
async def test_serialization_and_validation_failures_are_dead_at_once(opened: Opener) -> None:
    async with opened() as o:
        m1, m2 = await o.store.enqueue([draft(None), draft(None)])
        manual = await ManualWorker.join(o.store, policies=Policies())
        await manual.turn()
        failures = [
            manual.failure(m1, Reason.SERIALIZATION_ERROR),
            manual.failure(m2, Reason.VALIDATION_FAILURE),
        ]
        await manual.turn(failed=failures)
        assert {entry.reason for entry in await o.store.dead(Query())} == {
            Reason.SERIALIZATION_ERROR,
            Reason.VALIDATION_FAILURE,
        }


@pytest.mark.covers("003 the SQL of a failure: bits, error, attempts, schedule in one statement")
async def test_repeated_failure_report_counts_once(opened: Opener) -> None:
    async with opened() as o:
        (m1,) = await o.store.enqueue([draft()])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        failure = manual.failure(m1)
        await manual.turn(failed=[failure])
        await manual.turn(failed=[failure])
        (entry,) = await o.store.find(Query())
        assert (entry.attempt, entry.strikes) == (1, 1)


@pytest.mark.covers("003 bits only ever added")
async def test_completed_stages_are_never_removed_and_come_with_the_retry(
    opened: Opener,
) -> None:
    async with opened() as o:
        (m1,) = await o.store.enqueue([draft()])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        await manual.turn(
            failed=[manual.failure(m1, stages=int(Stage.STORED | Stage.EVENT_STORED))]
        )
        await o.pass_time(61)
        await manual.turn()
        assert manual.jobs[m1].stages == Stage.STORED | Stage.EVENT_STORED
        await manual.turn(failed=[manual.failure(m1, stages=0)])
        (entry,) = await o.store.find(Query())
        assert entry.stages == Stage.STORED | Stage.EVENT_STORED


@pytest.mark.covers("003 resume from the failure point")
async def test_step_is_durable_before_the_job_ends(opened: Opener) -> None:
    async with opened() as o:
        (m1,) = await o.store.enqueue([draft()])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        await manual.session.step(manual.jobs[m1], int(Stage.PUBLISHED))
        (entry,) = await o.store.find(Query())
        assert entry.stages == Stage.STORED | Stage.PUBLISHED


async def test_delayed_job_is_claimed_when_it_is_due(opened: Opener) -> None:
    async with opened() as o:
        later, now = await o.store.enqueue([draft(delay_seconds=100), draft()])
        manual = await ManualWorker.join(o.store)
        claimed = await manual.call()
        assert [job.seq for job in claimed.jobs] == [now]
        assert claimed.next_due_seconds is not None and 90 < claimed.next_due_seconds <= 100
        await o.pass_time(101)
        assert await manual.turn() == [later]
        assert manual.jobs[later].attempt == 1


@pytest.mark.covers("003 inbox: a message is stored once")
async def test_inbox_stores_a_message_once_even_within_one_call(opened: Opener) -> None:
    async with opened() as o:
        shop = {"source": "shop", "source_id": "42"}
        first = await o.store.enqueue(
            [draft(**shop), draft(**shop), draft(source="shop", source_id="43"), draft()]
        )
        assert first[1] == 0 and first[0] and first[2] and first[3]
        assert await o.store.enqueue([draft(**shop)]) == [0]
        manual = await ManualWorker.join(o.store)
        assert await manual.turn() == [first[0], first[2], first[3]]
        await manual.turn(completed=[first[0]])
        assert await o.store.enqueue([draft(**shop)]) == [0], "also after it was handled"


async def test_a_readers_position_is_stored_with_its_jobs(opened: Opener) -> None:
    async with opened() as o:
        assert await o.store.reader_offset("webhooks") is None
        await o.store.enqueue([draft()], [ReaderMark("webhooks", 0, 7)])
        assert await o.store.reader_offset("webhooks") == 7
        marks = [ReaderMark("webhooks", 0, 10, 7), ReaderMark("webhooks", 3, 4)]
        await o.store.enqueue([], marks)
        offsets = [await o.store.reader_offset("webhooks", shard) for shard in (0, 1, 3)]
        assert offsets == [10, None, 4], "a mark per shard"


async def test_a_reader_that_another_has_overtaken_stores_nothing(opened: Opener) -> None:
    async with opened() as o:
        await o.store.enqueue([], [ReaderMark("webhooks", shard, 7) for shard in (0, 3)])
        for stale in (
            [ReaderMark("webhooks", 0, 9)],
            [ReaderMark("webhooks", 0, 9, 6)],
            [ReaderMark("webhooks", 3, 9, 7), ReaderMark("webhooks", 0, 9, 8)],
            [ReaderMark("webhooks", 1, 9), ReaderMark("webhooks", 2, 9, 0)],
        ):
            with pytest.raises(VersionConflict, match="nothing was stored"):
                await o.store.enqueue([draft()], stale)
        offsets = [await o.store.reader_offset("webhooks", shard) for shard in range(4)]
        assert offsets == [7, None, None, 7] and not await o.store.find(Query())


async def test_of_readers_at_one_position_one_makes_the_jobs(opened: Opener) -> None:
    async with opened() as o:
        made = list[int]()

        async def read(reader: int) -> None:
            offset, replaces = 0, None
            while offset < 20:
                marks = [ReaderMark("webhooks", n, offset + 1, replaces) for n in range(3)]
                try:
                    await o.store.enqueue([draft()], marks)
                    made.append(offset + 1)
                except (VersionConflict, Unavailable):  # given up for the other: a deadlock
                    pass
                stored = await o.store.reader_offset("webhooks")
                offset, replaces = stored or 0, stored

        await asyncio.gather(*(read(number) for number in range(4)))
        assert sorted(made) == list(range(1, 21))
        assert len(await o.store.find(Query())) == 20


async def test_children_are_stored_exactly_with_their_parents_completion(opened: Opener) -> None:
    async with opened() as o:
        (m1,) = await o.store.enqueue([draft()])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        children = [Child(m1, draft("next", "mail")), Child(m1, draft(None, "log"))]
        born = await manual.turn(completed=[m1], children=children)
        assert len(born) == 2
        assert await manual.turn(completed=[m1], children=children) == [], (
            "a repeated report stores nothing"
        )


async def test_dead_letters_are_replayed_in_order_with_who_and_why(opened: Opener) -> None:
    async with opened() as o:
        seqs = await o.store.enqueue(
            [draft("a", payload=b"1"), draft("a", payload=b"2"), draft("b", "other")]
        )
        manual = await ManualWorker.join(o.store, policies=Policies())
        await manual.turn()
        await manual.turn(
            failed=[manual.failure(seq, Reason.VALIDATION_FAILURE, stages=4) for seq in seqs]
        )
        assert await o.store.replay(Query(type="order"), limit=10, by="ann", why="fixed") == 2
        assert [manual.jobs[seq].payload for seq in await manual.turn()] == [b"1", b"2"]
        replayed = [job for job in manual.jobs.values() if job.origin]
        assert [job.key for job in replayed] == seqs[:2]
        assert {job.stages for job in replayed} == {5}, "what was completed is not repeated"
        assert {(job.attempt, job.strikes) for job in replayed} == {(1, 0)}
        assert (await o.store.acts())[0].verb == "replay"
        with pytest.raises(NotFound):
            await o.store.replay(Query(seqs=seqs[:1]), limit=10, by="ann", why="again")
        assert await o.store.discard(Query(seqs=seqs[2:]), limit=10, by="ann", why="junk") == 1
        assert await o.store.dead(Query()) == []


@pytest.mark.parametrize(
    ("query", "meant"),
    [
        (Query(type="mail"), [1, 3]),
        (Query(stream="a"), [0, 1]),
        (Query(reason=Reason.VALIDATION_FAILURE), [0, 3]),
        (Query(type="mail", stream="b"), [3]),
        (Query(type="mail", stream="b", reason=Reason.SERIALIZATION_ERROR), []),
        (Query(fingerprint="print"), [0, 1, 2, 3]),
        (Query(fingerprint="another"), []),
    ],
)
async def test_filter_selects_the_same_in_every_verb(
    opened: Opener, query: Query, meant: list[int]
) -> None:
    async with opened() as o:
        kinds = [("a", "order"), ("a", "mail"), ("b", "order"), ("b", "mail")]
        seqs = await o.store.enqueue([draft(stream, type) for stream, type in kinds])
        asked = [seqs[place] for place in meant]
        manual = await ManualWorker.join(o.store, policies=Policies())
        await manual.turn()
        invalid, unreadable = Reason.VALIDATION_FAILURE, Reason.SERIALIZATION_ERROR
        reasons = [invalid, unreadable, unreadable, invalid]
        await manual.turn(
            failed=[manual.failure(seq, reason) for seq, reason in zip(seqs, reasons, strict=True)]
        )
        assert [entry.seq for entry in await o.store.dead(query)] == asked[::-1]
        if asked:
            assert await o.store.replay(query, limit=10, by="ann", why="fixed") == len(asked)
        else:
            with pytest.raises(NotFound):
                await o.store.replay(query, limit=10, by="ann", why="fixed")
        assert [manual.jobs[seq].origin for seq in await manual.turn()] == asked
        left = sorted(entry.seq for entry in await o.store.dead(Query()))
        assert left == sorted(set(seqs) - set(asked))


@pytest.mark.covers("003 stuck in a retry loop: reset attempts")
async def test_retry_with_reset_does_both_manual_repairs_of_the_document(opened: Opener) -> None:
    async with opened() as o:
        (m1,) = await o.store.enqueue([draft()])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        await manual.turn(failed=[manual.failure(m1)])
        assert await manual.turn() == []
        assert await o.store.retry([m1], reset=True, by="ann", why="fixed") == 1
        assert await manual.turn() == [m1]
        assert (manual.jobs[m1].attempt, manual.jobs[m1].strikes) == (1, 0)
        with pytest.raises(NotFound):
            await o.store.retry([m1 + 99], reset=False, by="ann", why="no such job")


@pytest.mark.covers("003 1: dead letter queue, then Status = 0")
async def test_operator_can_park_and_bury_and_the_owner_is_notified(opened: Opener) -> None:
    async with opened() as o:
        m1, m2 = await o.store.enqueue([draft(), draft()])
        manual = await ManualWorker.join(o.store)
        assert await o.store.park([m1], by="ann", why="look first") == 1
        claimed = await manual.call()
        assert claimed.notice
        (block,) = await manual.rewind()
        assert (block.head, block.policy, block.why) == (m1, OnFailure.PARK, "look first")
        assert await o.store.bury([m1], by="ann", why="hopeless") == 1
        assert (await manual.call()).notice
        assert await manual.rewind() == []
        assert await manual.turn() == [m2]
        assert [act.verb for act in await o.store.acts()] == ["dead", "park"]


async def test_job_parked_while_it_runs_stays_parked_when_it_fails(
    opened: Opener,
) -> None:
    async with opened() as o:
        fails, succeeds = await o.store.enqueue([draft("a"), draft("b")])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        await o.store.park([fails, succeeds], by="ann", why="look first")
        await manual.turn(failed=[manual.failure(fails)], completed=[succeeds])
        (entry,) = await o.store.find(Query())
        assert (entry.seq, entry.state, entry.due_at, entry.attempt) == (
            fails,
            State.PARKED,
            None,
            1,
        )
        assert [blocked.block.head for blocked in await o.store.streams()] == [fails]


async def test_postponed_job_keeps_its_last_failure(opened: Opener) -> None:
    async with opened() as o:
        failed, fresh = await o.store.enqueue([draft("a"), draft("b")])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        await manual.turn(failed=[manual.failure(failed, Reason.THROTTLED, error="too fast")])
        await o.pass_time(3600)
        assert await manual.turn() == [failed]
        verdict = FailureVerdict(FailureAction.POSTPONE, Reason.DEPENDENCY_FAILURE, 30.0)
        closed = Failure(Reason.DEPENDENCY_FAILURE, "BreakerOpen", "the breaker is open")
        put_off = [
            Failed(seq, manual.jobs[seq].attempt, verdict, closed) for seq in (failed, fresh)
        ]
        await manual.turn(failed=put_off)
        known, unknown = await o.store.find(Query())
        assert (known.reason, known.error, known.attempt) == (Reason.THROTTLED, "too fast", 1)
        assert (unknown.reason, unknown.error_type, unknown.attempt) == (
            Reason.DEPENDENCY_FAILURE,
            "BreakerOpen",
            0,
        )


async def test_failure_of_a_job_reset_while_it_ran_makes_the_worker_rewind(
    opened: Opener,
) -> None:
    async with opened() as o:
        (m1,) = await o.store.enqueue([draft()])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        await manual.turn(failed=[manual.failure(m1)])
        await o.pass_time(3600)
        assert await manual.turn() == [m1]
        second_run = manual.failure(m1)
        await o.store.park([m1], by="ann", why="stop it")
        await o.store.retry([m1], reset=True, by="ann", why="it is repaired")
        await manual.turn(running=[m1])
        assert (await manual.call(failed=[second_run])).notice
        await manual.session.rewind()
        assert await manual.turn() == [m1]
        assert manual.jobs[m1].attempt == 1


@pytest.mark.covers("003 metrics by reason")
async def test_stats_count_states_reasons_attempts_and_times(opened: Opener) -> None:
    async with opened() as o:
        begun = time.monotonic()
        m1, m2, m3 = await o.store.enqueue([draft(), draft(), draft(None)])
        await o.pass_time(3600)
        await o.store.enqueue([draft(None)])
        manual = await ManualWorker.join(o.store, policies=Policies())
        await manual.turn()
        failures = [
            manual.failure(m1, Reason.THROTTLED),
            manual.failure(m3, Reason.VALIDATION_FAILURE),
        ]
        await manual.turn(failed=failures, held=[m2])
        stats = await o.store.stats()
        oldest = 3600 + (time.monotonic() - begun)
        assert stats.by_state == {State.READY: 1, State.RETRY: 1, State.HELD: 1}
        assert stats.by_reason == {Reason.THROTTLED: 1}
        assert stats.by_attempt == {1: 1}
        assert (stats.dead, stats.scheduled, stats.blocked_streams, stats.poison_candidates) == (
            1,
            1,
            1,
            0,
        )
        assert stats.next_due_at is not None and stats.next_due_at == stats.last_due_at
        assert 3600 - 0.001 <= stats.oldest_age_seconds <= oldest + 0.001


async def test_dead_letters_are_counted_by_reason(opened: Opener) -> None:
    """None: buried by an operator before they ever failed."""
    async with opened() as o:
        assert await o.store.dead_counts() == {}
        seqs = await o.store.enqueue([draft(None) for _ in range(6)])
        manual = await ManualWorker.join(o.store, policies=Policies())
        await manual.turn()
        invalid = [manual.failure(seq, Reason.VALIDATION_FAILURE) for seq in seqs[:2]]
        await manual.turn(failed=[*invalid, manual.failure(seqs[2], Reason.THROTTLED)])
        expired = Failure(Reason.TIMEOUT_EXCEEDED, "Expired", "it waited too long")
        await o.store.bury(seqs[2:4], by="ann", why="not needed")
        await o.store.bury(seqs[4:5], by="holdfast", why="too old", failure=expired)
        invalid_now = {Reason.VALIDATION_FAILURE: 2}
        others = {Reason.THROTTLED: 1, Reason.TIMEOUT_EXCEEDED: 1, None: 1}
        assert await o.store.dead_counts() == {**invalid_now, **others}
        stats = await o.store.stats()
        assert (stats.dead, stats.dead_by_reason) == (5, {**invalid_now, **others})

        again = Query(reason=Reason.VALIDATION_FAILURE)
        assert await o.store.replay(again, limit=1, by="ann", why="repaired") == 1
        assert await o.store.dead_counts() == {Reason.VALIDATION_FAILURE: 1, **others}
        assert await o.store.discard(Query(), limit=9, by="ann", why="seen") == 4
        assert await o.store.dead_counts() == {}
        assert (await o.store.stats()).dead == 0


async def test_reason_that_only_a_newer_version_knows_is_unknown(opened: Opener) -> None:
    """In a rolling upgrade an operator still sees the jobs, and how many died."""
    async with opened() as o:
        seqs = await o.store.enqueue([draft(None) for _ in range(3)])
        newer = Failure(cast(Reason, 42), "E", "e")
        await o.store.bury(seqs[:2], by="holdfast", why="new", failure=newer)
        unknown = Failure(Reason.UNKNOWN, "E", "e")
        await o.store.bury(seqs[2:], by="holdfast", why="old", failure=unknown)
        assert (await o.store.stats()).dead_by_reason == {Reason.UNKNOWN: 3}
        for entry in await o.store.dead(Query()):
            assert (entry.reason, entry.reasons) == (Reason.UNKNOWN, [Reason.UNKNOWN])


async def test_cancelled_read_does_not_wait_for_a_postgres_that_hangs(
    postgres_server: Server,
) -> None:
    """A status, and a request with a deadline, are answered without it."""
    async with postgres_work(postgres_server.url) as o:
        assert await o.store.dead_counts() == {}
        with postgres.stopped(postgres_server):
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await o.store.dead_counts()
            assert time.monotonic() - began < 1
        assert await o.store.dead_counts() == {}


async def test_count_of_dead_letters_reads_their_index_alone(
    tmp_path: Path, postgres_server: Server
) -> None:
    """It runs every few seconds on every node, and nothing bounds dead letters."""
    async with embedded_work(tmp_path / "work.db") as o, o.store.transaction() as db:  # type: ignore[attr-defined]
        plan = db.execute(f"EXPLAIN QUERY PLAN {SQLITE['dead_counts']}").fetchall()
        assert [row[3] for row in plan] == ["SCAN dead USING COVERING INDEX dead_reason"]
    async with postgres_work(postgres_server.url):
        connection = await asyncpg.connect(postgres_server.url)
        try:
            await connection.execute("SET enable_seqscan = off")
            await connection.execute("SET enable_bitmapscan = off")
            plan = await connection.fetch(f"EXPLAIN {POSTGRES['dead_counts']}")
        finally:
            await connection.close()
        assert any("Index Only Scan using dead_reason" in row[0] for row in plan)


async def test_oldest_age_leaves_out_jobs_that_wait_on_purpose(opened: Opener) -> None:
    """Those of a disabled destination, and those whose time has not come."""
    async with opened() as o:
        parked = JobDraft("T", b"{}", None, "ep_disabled")
        delayed = JobDraft("T", b"{}", None, delay_seconds=7200)
        await o.store.enqueue([parked, delayed])
        await o.pass_time(3600)
        assert (await o.store.stats()).oldest_age_seconds >= 3600 - 0.001
        assert (await o.store.stats(["ep_disabled"])).oldest_age_seconds == 0
        await o.pass_time(3610)
        late = (await o.store.stats(["ep_disabled", "ep_other"])).oldest_age_seconds
        assert 10 - 0.001 <= late < 600, "from the time when it was due"


async def test_queries_of_operators_do_not_wait_for_a_writer_of_the_file(tmp_path: Path) -> None:
    async with embedded_work(tmp_path / "work.db") as o:
        (seq,) = await o.store.enqueue([draft()])
        written, looked = asyncio.Event(), asyncio.Event()

        async def write() -> None:
            async with o.store.transaction():  # type: ignore[attr-defined]
                written.set()
                await looked.wait()

        writing = asyncio.create_task(write())
        await written.wait()
        async with asyncio.timeout(10):
            assert (await o.store.stats()).by_state == {State.READY: 1}
            assert [entry.seq for entry in await o.store.find(Query())] == [seq]
        looked.set()
        await writing


async def test_list_of_blocked_streams_reads_the_jobs_once() -> None:
    """An operator looks when much is blocked."""

    async def cost(blocked: int) -> int:
        async with embedded_work(None) as o:
            await o.store.enqueue([draft(f"s{n % 100}") for n in range(2000)])
            for n in range(100 - blocked, 100):
                await o.store.park([n + 1], by="ann", why="later")
            assert [stream.waiting for stream in await o.store.streams()] == [19] * blocked
            return await steps_of(o.store, o.store.streams())

    assert await cost(100) < 10 * await cost(1), (
        "not a hundred times: then each stream would pass over all jobs"
    )


async def test_record_of_acts_forgets_the_oldest(opened: Opener) -> None:
    async with opened(acts_kept_max=3) as o:
        seqs = await o.store.enqueue([draft(None) for _ in range(5)])
        for seq in seqs:
            await o.store.park([seq], by="ann", why=f"the {seq}th")
        assert [act.why for act in await o.store.acts()] == [
            f"the {seq}th" for seq in reversed(seqs[2:])
        ]


@pytest.mark.covers("003 3: alert and investigate")
async def test_open_breakers_are_shared_and_end(opened: Opener) -> None:
    async with opened() as o:
        manual = await ManualWorker.join(o.store)
        left = await manual.session.breakers({"mail": 30.0}, [])
        assert 28 < left["mail"] <= 30
        (breaker,) = await o.store.open_breakers()
        assert (breaker.type, breaker.by) == ("mail", "hand")
        assert await manual.session.breakers({}, ["mail"]) == {}
        await manual.session.breakers({"mail": 30.0}, [])
        await o.pass_time(31)
        assert await o.store.open_breakers() == []


@pytest.mark.covers("003 attempts counted at failure")
async def test_job_that_kills_its_process_three_times_is_poison(
    opened: Opener,
) -> None:
    async with opened() as o:
        killer, innocent = await o.store.enqueue([draft(), draft()])
        for crash in range(3):
            manual = await ManualWorker.join(o.store, f"victim {crash}")
            claimed = await manual.call(starting=1)
            if crash == 0:
                assert claimed.started == {killer}
            else:
                assert claimed.started != {killer}, "a suspect is not started unannounced"
                await manual.call(running=[killer])
            job = manual.jobs[killer]
            assert (job.crashes, job.attempt, job.strikes) == (crash, 1, 0), (
                "a death costs no attempt and no strike"
            )
            await o.kill(manual.session)
        survivor = await ManualWorker.join(o.store, "survivor")
        assert await survivor.turn() == [innocent]
        (dead,) = await o.store.dead(Query())
        assert (dead.seq, dead.crashes, dead.reason) == (killer, 3, Reason.POISON_MESSAGE)
        assert (dead.attempt, dead.strikes, dead.error_type) == (0, 0, "ProcessDied")
        assert dead.error == "its worker died 3 times while it was in flight"
        assert survivor.jobs[innocent].crashes == 0


async def test_death_is_a_crash_of_suspects_in_flight_else_of_all_jobs_in_flight(
    opened: Opener,
) -> None:
    async with opened() as o:
        seqs = await o.store.enqueue([draft(None) for _ in range(5)])

        async def dies(*in_flight: int) -> list[int]:
            manual = await ManualWorker.join(o.store)
            await manual.turn()
            await manual.call(running=list(in_flight))
            await o.kill(manual.session)
            heir = await ManualWorker.join(o.store, "heir")
            await heir.turn()
            await heir.session.leave()
            return [heir.jobs[seq].crashes for seq in seqs if seq in heir.jobs]

        assert await dies(*seqs[:3]) == [1, 1, 1, 0, 0]
        assert await dies(*seqs[1:]) == [1, 2, 2, 0, 0], "those without a crash are not to blame"
        assert await dies(seqs[3], seqs[4]) == [1, 2, 2, 1, 1]
        assert await dies(*seqs[:2]) == [2, 2, 1, 1], "the third death is poison"
        assert [entry.seq for entry in await o.store.dead(Query())] == seqs[1:2]
        for entry in await o.store.find(Query()):
            assert (entry.attempt, entry.strikes, entry.error_type) == (0, 0, "ProcessDied")
            assert entry.error == "its worker died while it was in flight"


async def test_death_does_not_hide_a_failure_of_the_job_itself(opened: Opener) -> None:
    async with opened() as o:
        (seq,) = await o.store.enqueue([draft()])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        await manual.turn(failed=[manual.failure(seq)])
        await manual.session.leave()
        for _ in range(3):
            await o.pass_time(3600)
            manual = await ManualWorker.join(o.store)
            await manual.turn()
            await manual.call(running=[seq])
            await o.kill(manual.session)
            if entries := await o.store.find(Query()):
                assert (entries[0].reason, entries[0].error) == (Reason.HANDLER_EXCEPTION, "boom")
        await ManualWorker.join(o.store)
        (dead,) = await o.store.dead(Query())
        assert (dead.attempt, dead.strikes, dead.crashes, dead.reason) == (
            1,
            1,
            3,
            Reason.POISON_MESSAGE,
        )
        assert (
            dead.error
            == "its worker died 3 times while it was in flight; before that: ValueError: boom"
        )


async def test_suspect_that_failed_alone_runs_beside_others_until_the_next_death(
    opened: Opener,
) -> None:
    async with opened() as o:
        (seq,) = await o.store.enqueue([draft()])

        async def join_again() -> ManualWorker:
            await o.pass_time(86400)
            manual = await ManualWorker.join(o.store)
            await manual.turn()
            return manual

        async def dies() -> None:
            manual = await join_again()
            await manual.call(running=[seq])
            await o.kill(manual.session)

        for crashes in (0, 1):
            (entry,) = await o.store.find(Query())
            assert entry.crashes == crashes
            await dies()
            await (manual := await join_again()).session.leave()
        manual = await join_again()
        assert manual.jobs[seq].crashes == 2, "it runs alone"
        await manual.turn(failed=[manual.failure(seq)], running=[seq])
        await manual.session.leave()
        await (manual := await join_again()).session.leave()
        assert manual.jobs[seq].crashes == 1, "alone, it did not kill its worker: but it may yet"
        await dies()
        await dies()
        await join_again()
        (dead,) = await o.store.dead(Query())
        assert (dead.crashes, dead.attempt, dead.reason) == (3, 1, Reason.POISON_MESSAGE)


async def test_jobs_of_a_dead_worker_go_to_the_next_in_order(opened: Opener) -> None:
    async with opened() as o:
        seqs = await o.store.enqueue([draft() for _ in range(4)])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        await manual.turn(completed=seqs[:1])
        await o.kill(manual.session)
        heir = await ManualWorker.join(o.store, "heir")
        assert await heir.turn() == seqs[1:]
        assert heir.session.fence(heir.jobs[seqs[1]]) > 0


@pytest.mark.covers("003 completions by any instance")
async def test_zombie_reports_are_refused_with_lease_lost(opened: Opener) -> None:
    async with opened() as o:
        (m1,) = await o.store.enqueue([draft()])
        zombie = await ManualWorker.join(o.store, "zombie")
        await zombie.turn()
        old_fence = zombie.session.fence(zombie.jobs[m1])
        await o.kill(zombie.session)
        heir = await ManualWorker.join(o.store, "heir")
        assert await heir.turn() == [m1]
        assert heir.session.fence(heir.jobs[m1]) > old_fence
        with pytest.raises(LeaseLost):
            await zombie.turn(completed=[m1])
        with pytest.raises(LeaseLost):
            await zombie.session.step(zombie.jobs[m1], 4)
        (entry,) = await o.store.find(Query())
        assert (entry.seq, entry.stages) == (m1, 1)


async def test_leaving_worker_gives_back_jobs_it_did_not_start(opened: Opener) -> None:
    async with opened() as o:
        seqs = await o.store.enqueue([draft(), draft()])
        manual = await ManualWorker.join(o.store)
        await manual.turn(starting=2)
        await manual.session.leave()
        heir = await ManualWorker.join(o.store, "heir")
        assert await heir.turn() == seqs
        assert {job.crashes for job in heir.jobs.values()} == {0}


async def _do(connection: Any, sql: str) -> list[tuple[Any, ...]]:
    """The same statement on either engine's connection."""
    if isinstance(connection, apsw.Connection):
        return [tuple(row) for row in connection.execute(sql)]
    return [tuple(row) for row in await connection.fetch(sql)]


async def test_job_ends_with_its_handlers_transaction_or_not_at_all(opened: Opener) -> None:
    async with opened() as o:
        m1, m2, m3, _ = await o.store.enqueue([draft("a"), draft("b"), draft("a"), draft("c")])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        async with manual.session.transaction(manual.jobs[m1]) as connection:
            await _do(connection, "DROP TABLE IF EXISTS mine")
            await _do(connection, "CREATE TABLE mine (name TEXT)")
            await _do(connection, "INSERT INTO mine VALUES ('m1')")
        with pytest.raises(RuntimeError, match="on second thought"):
            async with manual.session.transaction(manual.jobs[m2]) as connection:
                await _do(connection, "INSERT INTO mine VALUES ('m2')")
                raise RuntimeError("on second thought")
        left = await o.store.find(Query())
        assert m1 not in [job.seq for job in left] and m2 in [job.seq for job in left]
        with pytest.raises(JobGone):
            async with manual.session.transaction(manual.jobs[m1]) as connection:
                await _do(connection, "INSERT INTO mine VALUES ('m1 again')")
        with pytest.raises(JobGone):
            await manual.session.step(manual.jobs[m1], int(Stage.PUBLISHED))
        await o.kill(manual.session)
        heir = await ManualWorker.join(o.store, "heir")
        with pytest.raises(LeaseLost):
            async with manual.session.transaction(manual.jobs[m3]) as connection:
                await _do(connection, "INSERT INTO mine VALUES ('by a zombie')")
        with pytest.raises(LeaseLost):
            await manual.session.step(manual.jobs[m3], int(Stage.PUBLISHED))
        assert m3 in await heir.turn()
        async with heir.session.transaction(heir.jobs[m3]) as connection:
            assert await _do(connection, "SELECT name FROM mine") == [("m1",)]


async def test_head_completed_in_its_transaction_lifts_its_block(
    opened: Opener,
) -> None:
    async with opened() as o:
        m1, m2 = await o.store.enqueue([draft(), draft()])
        manual = await ManualWorker.join(o.store)
        await manual.turn()
        await manual.turn(failed=[manual.failure(m1)], held=[m2])
        await o.pass_time(61)
        assert await manual.turn() == [m1]
        async with manual.session.transaction(manual.jobs[m1]):
            pass
        assert await o.store.streams() == []
        assert await manual.turn(backlogs={"s": 0}) == [m2]
