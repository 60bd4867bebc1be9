"""The wall clock of a serving node jumps by an hour and more, forth and back: nothing
that is owed depends on it.

A real process under libfaketime. People stay connected and talk, webhooks leave once
each although one is on its way during every jump, and limits count the time that
passed, not the time it says.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from result_counts import tally
from supervisor import Life, Person, Settings, Supervisor, executed

from engines.faketime import WallClock
from holdfast.access.secrets import read_secrets
from holdfast.clock import timestamp
from holdfast.verify.checkers import check, red
from holdfast.verify.history import Closed, Header, Opened, Recorder
from proof.results import Row

JUMPS = 10
SEED = 30_000
HOUR = 3600
SLOW = ("token_bucket", "fixed_window", "sliding_window")
CHAT_SECONDS_MAX = 10.0
WEBHOOK_SECONDS_MAX = 20.0


class Hook:
    """Where webhooks arrive; while ``hold`` is set it does not answer, so that they
    stay on their way.
    """

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self.stamped = ""
        self.arrived = asyncio.Condition()
        self.go_on = asyncio.Event()
        self.go_on.set()

    @asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        receiver = web.Application()
        receiver.router.add_post("/hook", self._take)
        runner = web.AppRunner(receiver)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
        await runner.cleanup()

    async def has(self, count: int) -> None:
        async with asyncio.timeout(WEBHOOK_SECONDS_MAX), self.arrived:
            await self.arrived.wait_for(lambda: len(self.taken) >= count)

    async def _take(self, request: web.Request) -> web.Response:
        event = json.loads(await request.read())
        async with self.arrived:
            self.taken[event["data"]["content"]] += 1
            self.stamped = event["data"]["created_at"]
            self.arrived.notify_all()
        await self.go_on.wait()
        return web.Response()


def _minutes() -> int:
    """A window shorter than a jump that does not end by itself during the test; the
    monotonic clock aligns it.
    """
    now = time.monotonic()
    return next(minutes for minutes in range(45, 60) if now % (minutes * 60) < minutes * 60 - 400)


class Operator:
    """Rules and checks over REST, with keys: they have no time in them."""

    def __init__(self, client: httpx.AsyncClient, admin_key: str) -> None:
        self._client = client
        self._admin = {"Authorization": f"Bearer {admin_key}"}

    async def set_up(self, hook: str) -> None:
        """A webhook; of each algorithm a rule that allows three in less than an hour,
        and one that allows very many.
        """
        await self._done("POST", "/admin/webhooks", {"url": hook})
        key = await self._done(
            "POST", "/admin/keys", {"kind": "tenant", "label": "checks", "tenant": "default"}
        )
        self._tenant = {"Authorization": f"Bearer {key['secret']}"}
        for algorithm in SLOW:
            for name, limit, window in (("slow", 3, f"{_minutes()}m"), ("fast", 10_000, "1s")):
                rule = {
                    "tenantID": "default",
                    "resource": f"{name}-{algorithm}",
                    "algorithm": algorithm,
                }
                await self._done("POST", "/admin/rules", {**rule, "limit": limit, "window": window})

    async def allowed(self, resource: str) -> bool:
        body = {"resource": resource, "subject": "ann"}
        answer = await self._client.post("/v1/limits/check", json=body, headers=self._tenant)
        assert answer.status_code == 200, answer.text
        said = answer.json()
        assert said["rule"] == f"default/{resource}" and not said["degraded"], said
        return bool(said["allowed"])

    async def _done(self, method: str, path: str, body: dict[str, object]) -> dict[str, object]:
        answer = await self._client.request(
            method, path, json={**body, "reason": "test"}, headers=self._admin
        )
        assert answer.is_success, answer.text
        done: dict[str, object] = answer.json()
        return done


@pytest.mark.long
def test_jumps_of_the_wall_clock_lose_close_repeat_and_admit_nothing(
    tmp_path: Path, wall_clock: WallClock
) -> None:
    began = time.monotonic()
    record = Recorder(Header(seed=SEED))
    texts = asyncio.run(_story(tmp_path, wall_clock, record))
    verdicts = check(record.history())
    closings = [
        event
        for event in record.events
        if isinstance(event, Closed) and (event.by != "client" or event.why)
    ]
    print("\n".join(map(str, [*closings, *(verdict for verdict in verdicts if not verdict.ok)])))
    tally(
        Row(
            name="clock jumps",
            how=(
                "a real node under libfaketime; its wall clock jumps by one or two hours, forth and"
                " back, while people talk and a webhook is on its way"
            ),
            runs=JUMPS,
            failures=int(bool(red(verdicts) or closings)),
            requirement=(
                "all checkers green, no connection closed, every webhook once, no rule admits more"
                " or less"
            ),
            seed=str(SEED),
            seconds=time.monotonic() - began,
            figures={
                "messages": len(texts),
                "facts examined": f"{sum(verdict.examined for verdict in verdicts):,}",
            },
        )
    )
    assert not closings
    assert sum(isinstance(event, Opened) for event in record.events) == 2, (
        "each connected once, and stayed"
    )


async def _story(tmp_path: Path, wall_clock: WallClock, record: Recorder) -> list[str]:
    async def start(settings: Settings, kill_at: str, directory: Path) -> Life:
        wider = {**settings, "work.webhooks.private_allowed": "true"}
        return await executed(wider, kill_at, directory, wall_clock.environment)

    supervisor = Supervisor(tmp_path, record, SEED, start)
    chat_id = await supervisor.prepare("ann", "bob")
    await supervisor.spawn()
    assert await supervisor.serving()
    people = [Person(supervisor, user, tmp_path) for user in ("ann", "bob")]
    hook = Hook()
    async with (
        asyncio.timeout(300),
        hook.served() as url,
        httpx.AsyncClient(base_url=supervisor.url, timeout=CHAT_SECONDS_MAX) as client,
        people[0].online(),
        people[1].online(),
    ):
        operator = Operator(client, read_secrets(supervisor.state_dir).admin_key)
        await operator.set_up(url)
        texts = await _jump_and_talk(supervisor, wall_clock, people, hook, operator, chat_id)
        for person in people:
            person.note_copies(chat_id)
        assert hook.taken == Counter(texts), "each webhook once"
    await supervisor.stop()
    await supervisor.note_state()
    return texts


async def _jump_and_talk(
    supervisor: Supervisor,
    wall_clock: WallClock,
    people: list[Person],
    hook: Hook,
    operator: Operator,
    chat_id: str,
) -> list[str]:
    """Every jump comes while a webhook waits for its answer; what is said before and
    after it leaves as usual.
    """
    rng = random.Random(SEED)
    texts: list[str] = []
    for algorithm in SLOW:
        assert [await operator.allowed(f"slow-{algorithm}") for _ in range(4)] == [True] * 3 + [
            False
        ], algorithm
    offset = 0
    for jump in range(JUMPS):
        hook.go_on.clear()
        await _all_say(people, f"before {jump}", chat_id, texts)
        await hook.has(len(texts) - 1)  # the chat is one stream: the second waits for the first
        offset = rng.choice([each for each in (-HOUR, 0, HOUR) if each != offset])
        wall_clock.set(offset)
        await _all_say(people, f"after {jump}", chat_id, texts)
        hook.go_on.set()
        await hook.has(len(texts))
        at = time.time() + offset
        assert timestamp(at - 60) < hook.stamped < timestamp(at + 60), (
            "it did jump, for people to see"
        )
        for algorithm in SLOW:
            assert not await operator.allowed(f"slow-{algorithm}"), (
                f"{algorithm} took the jump for time"
            )
            assert await operator.allowed(f"fast-{algorithm}"), f"{algorithm} waits for the clock"
    assert supervisor.kills == 0
    return texts


async def _all_say(people: list[Person], what: str, chat_id: str, texts: list[str]) -> None:
    """Each says one thing, and all have it."""
    said = [f"{person.user} {what}" for person in people]
    async with asyncio.timeout(CHAT_SECONDS_MAX):
        await asyncio.gather(
            *(person.say(chat_id, text) for person, text in zip(people, said, strict=True))
        )
        texts += said
        await asyncio.gather(*(person.has(chat_id, len(texts)) for person in people))
