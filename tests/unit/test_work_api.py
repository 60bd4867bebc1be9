"""Jobs and webhooks over REST: what operators see, and the acts that repair it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from api_rig import Rest, error_of, serving
from work_rigs import ManualWorker, draft

from holdfast.api.deps import ApiSettings
from holdfast.eventlog.contract import START
from holdfast.eventlog.memory import MemoryEventLog
from holdfast.webhooks.contract import WebhookEndpoint
from holdfast.webhooks.reader import WebhookReader
from holdfast.work.inspection import Query
from holdfast.work.job import Policies, Reason
from holdfast.work.sqlite.store import MemoryWork

pytestmark = pytest.mark.real_time


@asynccontextmanager
async def served(
    tmp_path: Path, settings: ApiSettings | None = None
) -> AsyncIterator[tuple[Rest, MemoryWork]]:
    async with serving(settings, folder=tmp_path) as rest:
        assert isinstance(rest.deps.work.jobs, MemoryWork)
        yield rest, rest.deps.work.jobs


async def in_trouble(jobs: MemoryWork) -> tuple[ManualWorker, list[int]]:
    """One stream blocked by its head with two behind it, and one dead letter."""
    seqs = await jobs.enqueue([draft(payload=b'{"n":1}'), draft(), draft(type="mail"), draft(None)])
    manual = await ManualWorker.join(jobs, policies=Policies())
    await manual.turn()
    failures = [
        manual.failure(seqs[0], Reason.THROTTLED),
        manual.failure(seqs[3], Reason.VALIDATION_FAILURE),
    ]
    await manual.turn(failed=failures, held=seqs[1:3])
    return manual, seqs


async def test_operator_sees_waiting_jobs_and_why(tmp_path: Path) -> None:
    async with served(tmp_path) as (rest, jobs):
        _, seqs = await in_trouble(jobs)
        key = rest.admin_key("jobs:read")
        listed = (await rest.ask("GET", "/admin/jobs?state=retry", key)).json()["jobs"]
        assert [(job["seq"], job["reason"], job["attempt"]) for job in listed] == [
            (seqs[0], "throttled", 1)
        ]
        assert listed[0]["payload"] is None
        one = (await rest.ask("GET", f"/admin/jobs/{seqs[0]}", key)).json()
        assert (one["payload"], one["trace"]) == ('{"n":1}', "trace")
        stats = (await rest.ask("GET", "/admin/jobs/stats", key)).json()
        assert (stats["by_state"], stats["dead"]) == ({"retry": 1, "held": 2}, 1)
        assert stats["dead_by_reason"] == {"validation_failure": 1}
        (stream,) = (await rest.ask("GET", "/admin/jobs/streams", key)).json()["streams"]
        assert (stream["stream"], stream["head"], stream["waiting"]) == ("s", seqs[0], 2)
        (dead,) = (await rest.ask("GET", "/admin/jobs/dead", key)).json()["jobs"]
        assert (dead["seq"], dead["state"], dead["reason"]) == (
            seqs[3],
            "dead",
            "validation_failure",
        )
        assert dead["reasons"] == ["validation_failure"]
        assert (await rest.ask("GET", "/admin/jobs/breakers", key)).json() == {"breakers": []}
        assert error_of(await rest.ask("GET", "/admin/jobs/999", key)) == (404, "NOT_FOUND")
        assert error_of(await rest.ask("GET", "/admin/jobs/nonsense", key)) == (404, "NOT_FOUND")


async def test_repairing_acts_are_recorded_with_by_and_why(tmp_path: Path) -> None:
    async with served(tmp_path) as (rest, jobs):
        manual, seqs = await in_trouble(jobs)
        key = rest.admin_key("jobs:read", "jobs:write")

        async def act(verb: str, **body: Any) -> int:
            answer = await rest.ask(
                "POST", f"/admin/jobs/{verb}", key, {"reason": "to repair it", **body}
            )
            assert answer.status_code == 200, answer.text
            return int(answer.json()["count"])

        assert await act("release", stream="s", type="mail") == 1
        await manual.call()
        await manual.rewind()
        assert await manual.turn() == [seqs[2]]
        assert await act("retry", seqs=[seqs[0]], reset=True) == 1
        assert await manual.turn() == [seqs[0]]
        assert await act("park", seqs=[seqs[1]]) == 1
        assert await act("bury", seqs=[seqs[1]]) == 1
        assert await act("replay", seqs=[seqs[3]]) == 1
        assert await act("discard", type="order") == 1
        acts = (await rest.ask("GET", "/admin/jobs/acts", key)).json()["acts"]
        assert [a["verb"] for a in acts] == [
            "discard",
            "replay",
            "dead",
            "park",
            "retry",
            "release",
        ]
        assert {a["why"] for a in acts} == {"to repair it"}
        assert all(a["by"] for a in acts)
        first = (await rest.ask("GET", "/admin/jobs/acts?limit=4", key)).json()
        rest_of_it = (
            await rest.ask("GET", f"/admin/jobs/acts?limit=4&before={first['next_before']}", key)
        ).json()
        assert first["acts"] + rest_of_it["acts"] == acts and rest_of_it["next_before"] is None
        audit = (await rest.ask("GET", "/admin/audit", rest.admin_key("audit:read"))).json()[
            "records"
        ]
        assert [(record["action"], record["target"]) for record in audit] == [
            ("jobs.release", "s mail"),
            ("jobs.retry", f"{seqs[0]} reset"),
            ("jobs.park", str(seqs[1])),
            ("jobs.bury", str(seqs[1])),
            ("jobs.replay", f"{seqs[3]} at most 100"),
            ("jobs.discard", "order at most 100"),
        ]
        assert {record["reason"] for record in audit} == {"to repair it"}


async def test_act_on_nothing_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as (rest, jobs):
        key = rest.admin_key("jobs:write")
        for verb, body in (
            ("retry", {"seqs": [1]}),
            ("park", {"seqs": [1]}),
            ("bury", {"seqs": [1]}),
            ("release", {"stream": "s", "through": 9}),
            ("replay", {}),
            ("discard", {"type": "x"}),
        ):
            answer = await rest.ask("POST", f"/admin/jobs/{verb}", key, {"reason": "r", **body})
            assert error_of(answer) == (404, "NOT_FOUND"), verb
        vague = await rest.ask("POST", "/admin/jobs/release", key, {"reason": "r", "stream": "s"})
        assert error_of(vague) == (400, "INVALID_MESSAGE")
        assert await jobs.acts() == []


async def test_scope_jobs_read_shows_no_message_of_a_webhook(tmp_path: Path) -> None:
    """A job names the message and holds no copy of it, nor does a dead letter."""

    async with served(tmp_path) as (rest, jobs):
        log, key = MemoryEventLog(), rest.admin_key("jobs:read")
        rest.store.on_commit(log.committed)
        endpoints = rest.deps.work.webhooks.endpoints
        long_ago = "2020-01-01T00:00:00.000Z"
        await endpoints.add(
            WebhookEndpoint("ep_1", "acme", "https://example.com/", "whsec_secret", "", long_ago)
        )
        chat = await rest.chat()
        await rest.send(chat, "private words", "k1")
        await WebhookReader(log, endpoints, jobs, rest.store, rest.clock).advance(START)
        (waiting,) = await jobs.find(Query())
        shown = [
            await rest.ask("GET", path, key)
            for path in ("/admin/jobs", f"/admin/jobs/{waiting.seq}")
        ]
        await jobs.bury([waiting.seq], by="op", why="test")
        shown += [
            await rest.ask("GET", path, key)
            for path in ("/admin/jobs/dead", f"/admin/jobs/{waiting.seq}")
        ]
        for answer in shown:
            assert answer.status_code == 200 and "ep_1" in answer.text
            assert "private words" not in answer.text and "whsec" not in answer.text


async def test_webhook_endpoints_are_managed_and_tested(tmp_path: Path) -> None:
    async with served(tmp_path) as (rest, jobs):
        key = rest.admin_key("webhooks:write")
        new = {"url": "https://example.com/hook", "tenant": "acme", "reason": "the shop wants it"}
        made = await rest.ask("POST", "/admin/webhooks", key, new)
        assert made.status_code == 201
        hook = made.json()
        assert hook["secret"].startswith("whsec_")
        (listed,) = (await rest.ask("GET", "/admin/webhooks", key)).json()["endpoints"]
        assert listed == {**hook, "secret": None, "waiting": 0}
        where = f"/admin/webhooks/{hook['endpoint_id']}"
        assert (await rest.ask("POST", where + "/test", key, {"reason": "try"})).json() == {
            "count": 1
        }
        assert [entry.type for entry in await jobs.find(Query())] == ["webhook"]
        assert (await rest.ask("GET", where + "/deliveries", key)).json() == {"deliveries": []}
        assert (await rest.ask("POST", where + "/enable", key, {"reason": "try"})).json()[
            "disabled"
        ] == ""
        assert (await rest.ask("DELETE", where + "?reason=done", key)).status_code == 200
        assert error_of(await rest.ask("GET", where + "/deliveries", key)) == (404, "NOT_FOUND")
        audit = (await rest.ask("GET", "/admin/audit", rest.admin_key("audit:read"))).json()[
            "records"
        ]
        acts = [(record["action"], record["reason"]) for record in audit]
        assert acts == [
            ("webhook.add", "the shop wants it"),
            ("webhook.test", "try"),
            ("webhook.enable", "try"),
            ("webhook.remove", "done"),
        ]
        inside = await rest.ask("POST", "/admin/webhooks", key, {**new, "url": "https://10.0.0.1/"})
        assert error_of(inside) == (400, "INVALID_MESSAGE")


async def test_act_beyond_its_deadline_has_an_unknown_outcome(tmp_path: Path) -> None:
    """Whatever it is that does not answer: the jobs, the endpoints of webhooks."""

    enough_for_what_comes_before = ApiSettings(request_seconds_max=1)
    async with served(tmp_path, settings=enough_for_what_comes_before) as (rest, jobs):
        endpoints, key = rest.deps.work.webhooks.endpoints, rest.admin_key()
        await endpoints.add(
            WebhookEndpoint("ep_1", "acme", "https://example.com/", "whsec_secret", "", "2020")
        )

        async def never(*_: object, **__: object) -> None:
            await asyncio.Event().wait()

        for source, verbs in (
            (jobs, "retry park bury release replay discard enqueue"),
            (endpoints, "add remove disable enable"),
        ):
            for verb in verbs.split():
                setattr(source, verb, never)
        why = {"reason": "test"}
        asked = [
            rest.ask("POST", f"/admin/jobs/{act}", key, {**why, "seqs": [1]})
            for act in ("retry", "park", "bury")
        ]
        asked += [rest.ask("POST", f"/admin/jobs/{act}", key, why) for act in ("replay", "discard")]
        asked += [
            rest.ask("POST", "/admin/jobs/release", key, {**why, "stream": "s", "through": 1}),
            rest.ask("POST", "/admin/webhooks", key, {**why, "url": "https://example.com/hook"}),
            rest.ask("POST", "/admin/webhooks/ep_1/enable", key, why),
            rest.ask("POST", "/admin/webhooks/ep_1/test", key, why),
            rest.ask("DELETE", "/admin/webhooks/ep_1?reason=test", key),
        ]
        async with asyncio.timeout(30):
            for answer in await asyncio.gather(*asked):
                assert error_of(answer) == (503, "SERVICE_UNAVAILABLE"), answer.text
                assert answer.json()["error"]["outcome"] == "unknown"
