"""A disabled endpoint: what comes due is parked, what is new too, and all of it is sent
in order when it is enabled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from webhook_rig import SECRET, Log, Receiver, Scene, entry, receiving, scene, until
from work_rigs import WORK_STORES, Opener, ShiftedClock, opener_of

from holdfast.clock import SystemClock, timestamp
from holdfast.message import LogEntry
from holdfast.webhooks.contract import WebhookEndpoint
from holdfast.webhooks.delivery import DeliveryNotice, WebhookSettings, draft_of
from holdfast.webhooks.parking import Parking
from holdfast.webhooks.sqlite import SqliteEndpoints
from holdfast.work.handlers import Context, Handlers
from holdfast.work.inspection import Query
from holdfast.work.job import JobDraft, Reason
from holdfast.work.sqlite.store import MemoryWork
from holdfast.work.worker import Worker

DAY = 86400.0


@pytest.fixture(params=WORK_STORES)
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Opener:
    return opener_of(request, tmp_path)


def messages(first: int, last: int) -> list[LogEntry]:
    return [entry(n, f"c{n % 3}") for n in range(first, last + 1)]


def in_order(receiver: Receiver, last: int) -> bool:
    """Whether it has accepted each message once, each chat in order."""
    by_chat: dict[str, list[int]] = {}
    for _, body in receiver.calls:
        data = msgspec.json.decode(body)["data"]
        by_chat.setdefault(data["chat_id"], []).append(data["sequence"])
    wanted = {f"c{k}": [n for n in range(1, last + 1) if n % 3 == k] for k in range(3)}
    assert all(got == wanted[chat][: len(got)] for chat, got in by_chat.items()), by_chat
    return by_chat == wanted


async def parked(stage: Scene, jobs: int) -> bool:
    """Whether this number waits for the endpoint and none of them is about to run."""
    waiting = await stage.jobs.waiting(["ep_1"])
    found = await stage.jobs.find(Query(), 1000)
    assert [each.attempt for each in found] == [0] * len(found), (
        "what was not sent has no attempt and no strike"
    )
    return (
        "ep_1" in waiting
        and waiting["ep_1"].jobs == jobs
        and {each.state.name for each in found} == {"HELD"}
    )


async def test_enable_after_410_sends_everything_in_order(opener: Opener, tmp_path: Path) -> None:
    async with (
        opener() as opened,
        receiving() as receiver,
        scene(tmp_path, jobs=opened.store) as stage,
    ):
        await until(lambda: _started(stage))
        gone = asyncio.Event()
        receiver.answer = lambda _: web.Response(status=410 if gone.is_set() else 204)
        await stage.add(receiver.url)
        stage.log.entries += messages(1, 6)
        await until(lambda: in_order(receiver, 6))
        await until(lambda: _empty(stage))  # received is not yet answered
        gone.set()
        refused = len(receiver.calls)
        stage.log.entries += messages(7, 20)
        await until(lambda: parked(stage, 14))
        endpoint = await stage.endpoints.get("ep_1")
        assert "410" in endpoint.disabled and endpoint.disabled_at
        assert len(receiver.calls) - refused <= 3, "one for each chat, at most"
        stage.log.entries += messages(21, 30)
        await until(lambda: parked(stage, 24))
        assert not await stage.jobs.dead(Query())
        del receiver.calls[refused:]
        gone.clear()
        await stage.endpoints.enable("ep_1")
        await until(lambda: in_order(receiver, 30))
        await until(lambda: _empty(stage))


async def _started(stage: Scene) -> bool:
    return stage.reader.begun


async def _empty(stage: Scene) -> bool:
    return not await stage.jobs.find(Query())


@pytest.mark.parametrize("opener", ["sqlite", "postgres"], indirect=True)
async def test_parked_jobs_survive_a_restart_and_other_endpoints_continue(
    opener: Opener, tmp_path: Path
) -> None:
    log = Log()
    async with opener() as opened, receiving() as receiver, receiving() as other:
        async with scene(tmp_path, jobs=opened.store, log=log) as stage:
            await until(lambda: _started(stage))
            await stage.add(receiver.url)
            await stage.add(other.url, endpoint_id="ep_2")
            await stage.endpoints.disable("ep_1", "by an operator", timestamp(SystemClock().now()))
            log.entries += messages(1, 9)
            await until(lambda: in_order(other, 9))
            await until(lambda: _waiting(stage, 9))
        async with scene(tmp_path, jobs=opened.store, log=log) as stage:
            log.entries += messages(10, 18)
            await until(lambda: in_order(other, 18))
            await until(lambda: parked(stage, 18))
            assert not receiver.calls
            await stage.endpoints.enable("ep_1")
            await until(lambda: in_order(receiver, 18))


async def _waiting(stage: Scene, jobs: int) -> bool:
    waiting = await stage.jobs.waiting(["ep_1", "ep_2"])
    return {name: each.jobs for name, each in waiting.items()} == {"ep_1": jobs}


async def test_running_worker_starts_nothing_of_a_paused_destination_until_resumed() -> None:

    store, handlers, ran, go_on = (
        MemoryWork(),
        Handlers(),
        list[tuple[str, int]](),
        asyncio.Event(),
    )

    @handlers.handle(DeliveryNotice, type="hook", per_destination_max=4)
    async def handle(ctx: Context, notice: DeliveryNotice) -> None:
        ran.append((notice.endpoint_id, notice.sequence))
        if notice.sequence == 1:
            await go_on.wait()

    def drafts(endpoint: str, *sequences: int) -> list[JobDraft]:
        return [replace(_draft(endpoint, n), type="hook", stream=endpoint) for n in sequences]

    async with Worker(store, handlers).running() as worker:
        await store.enqueue(drafts("ep_1", 1, 2, 3))
        await until(lambda: ran)
        worker.pause({("hook", "ep_1")})
        go_on.set()
        for n in range(2, 6):
            await store.enqueue(drafts("ep_1", n + 2) + drafts("ep_2", n))
            await until(lambda n=n: ("ep_2", n) in ran)
        assert ran == [("ep_1", 1), *(("ep_2", n) for n in range(2, 6))]
        worker.pause(())
        await until(lambda: len(ran) == 11)
    assert ran[5:] == [("ep_1", n) for n in range(2, 8)]


async def test_disable_and_enable_at_any_moment_lose_nothing_and_keep_order(
    tmp_path: Path,
) -> None:
    async with receiving() as receiver, scene(tmp_path) as stage:
        await until(lambda: _started(stage))
        await stage.add(receiver.url)
        for turn in range(12):
            stage.log.entries += messages(turn * 10 + 1, turn * 10 + 10)
            if turn % 2:
                await stage.endpoints.enable("ep_1")
            else:
                await stage.endpoints.disable(
                    "ep_1", "by an operator", timestamp(SystemClock().now())
                )
            await until(_moved(stage, receiver, len(receiver.calls)))
        await until(lambda: in_order(receiver, 120))


def _moved(
    stage: Scene, receiver: Receiver, before: int
) -> Callable[[], Coroutine[Any, Any, bool]]:
    """A few calls more, or disabled: each turn ends at another moment."""

    async def moved() -> bool:
        return len(receiver.calls) > before + 4 or bool(
            (await stage.endpoints.get("ep_1")).disabled
        )

    return moved


@pytest.mark.parametrize("aged", [False, True])
async def test_too_many_or_too_old_parked_jobs_become_dead_letters(
    opener: Opener, tmp_path: Path, aged: bool
) -> None:
    clock = ShiftedClock()
    endpoints = await SqliteEndpoints.open(tmp_path / "webhooks.db")
    await endpoints.add(
        WebhookEndpoint("ep_1", "acme", "https://example.com", SECRET, "", "2026-01-01")
    )
    await endpoints.disable("ep_1", "by an operator: gone", timestamp(clock.now()))
    settings = WebhookSettings(parked_max=1000 if aged else 5)
    async with opener() as opened:
        parking = Parking(endpoints, opened.store, lambda _: None, lambda _: None, clock, settings)
        seqs = await opened.store.enqueue([_draft("ep_1", n) for n in range(8)])
        others = await opened.store.enqueue([_draft("ep_2", n) for n in range(8)])
        await parking.update()
        clock.ahead = 6.9 * DAY
        await parking.expire()
        assert parking.status.parked == {"ep_1": 8 if aged else 5}
        clock.ahead = 7.1 * DAY if aged else 0.0
        await parking.expire()
        dead = list(reversed(await opened.store.dead(Query())))
        assert [letter.seq for letter in dead] == (seqs if aged else seqs[:3]), "the oldest"
        why = "it was parked for 7 days" if aged else "more than 5 jobs were parked"
        assert {(letter.reason, letter.error_type) for letter in dead} == {
            (Reason.TRANSPORT_UNAVAILABLE, "EndpointDisabled")
        }
        assert {letter.error for letter in dead} == {
            f"ep_1 is disabled (by an operator: gone): {why}"
        }
        kept = [] if aged else seqs[3:]
        assert [job.seq for job in await opened.store.find(Query())] == kept + others
        assert (await opened.store.acts())[0].by == "holdfast"
        if not aged:
            await opened.store.enqueue([_draft("ep_1", 8)])
            await parking.expire()
            assert len(await opened.store.dead(Query())) == 4, "one too many is too many"
    await endpoints.close()


async def test_age_of_parked_jobs_counts_from_the_disabling(
    tmp_path: Path,
) -> None:
    """The seven days are those it was parked, not those it had waited before."""

    clock = ShiftedClock()
    endpoints = await SqliteEndpoints.open(tmp_path / "webhooks.db")
    await endpoints.add(
        WebhookEndpoint("ep_1", "acme", "https://example.com", SECRET, "", "2026-01-01")
    )
    async with opener_of_memory() as opened:
        await opened.store.enqueue([_draft("ep_1", 1)])
        clock.ahead = 30 * DAY
        await endpoints.disable("ep_1", "by an operator", timestamp(clock.now()))
        await endpoints.disable(
            "ep_1", "the endpoint answered 410 Gone", timestamp(clock.now() + DAY)
        )
        parking = Parking(
            endpoints, opened.store, lambda _: None, lambda _: None, clock, WebhookSettings()
        )
        await parking.update()
        for days, left in ((30, 1), (36.9, 1), (37.1, 0)):
            clock.ahead = days * DAY
            await parking.expire()
            assert parking.status.parked == {"ep_1": left}
    await endpoints.close()


def opener_of_memory() -> Any:
    from work_rigs import embedded_work

    return embedded_work(None)


def _draft(endpoint_id: str, n: int) -> Any:
    return draft_of(DeliveryNotice(endpoint_id, "acme", "2026-01-01", f"c{n % 3}", n, f"msg_{n}"))
