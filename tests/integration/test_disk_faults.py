"""A disk that is slow, fails or is full under a serving node: late or typed answers,
and no false one.

A real process whose own system calls are disturbed (strace) while people talk; then the
disk heals and it goes on by itself. In the end it is killed, so that only what reached
the disk is judged.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest
from result_counts import tally
from supervisor import Life, Person, Settings, Supervisor, all_have_all, executed, talk

from engines.strace import Strace
from holdfast.verify.checkers import check, red
from holdfast.verify.history import FaultWindow, Header, Recorder
from proof.results import Row

SEED = 40_000
ROUNDS = 2
SYNCS, WRITES = "fdatasync,fsync", "pwrite64"
DISKS = {
    "slow": (SYNCS, "delay_enter=200000"),
    "hanging": (SYNCS, "delay_enter=1000000"),
    "sync: EIO": (SYNCS, "error=EIO"),
    "write: EIO": (WRITES, "error=EIO"),
    "full": (WRITES, "error=ENOSPC"),
}
"""The second is slower than the deadline of a send as it is set here."""
FAULT_SECONDS = 1.3
REST_SECONDS = 0.5
HEALED_SECONDS_MAX = 10.0
IMPATIENT = {
    "gateway.timeouts.durability_rpc_seconds": "0.5",
    "gateway.circuit_breaker.failure_threshold": 2,
    "gateway.circuit_breaker.open_duration_seconds": str(REST_SECONDS),
}


@pytest.mark.long
def test_a_disk_in_trouble_makes_no_false_ack_and_the_server_goes_on_when_it_heals(
    tmp_path: Path, strace: Strace
) -> None:
    began = time.monotonic()
    supervisor = Supervisor(tmp_path, Recorder(Header(seed=SEED)), SEED, _impatient)
    met = asyncio.run(_story(tmp_path, supervisor, strace))
    history = supervisor.record.history()
    verdicts = check(history)
    print("\n".join(str(verdict) for verdict in verdicts if not verdict.ok))
    tally(
        Row(
            name="disk faults",
            how=(
                "a real node whose syncs are slow or hang, whose syncs or writes fail with EIO or"
                " ENOSPC (strace), while people talk; then SIGKILL"
            ),
            runs=len(met),
            failures=len(red(verdicts)),
            requirement=(
                "all checkers green: 0 false acks, typed answers in time; serves again by itself"
            ),
            seed=str(SEED),
            seconds=time.monotonic() - began,
            figures={
                "operations": f"{len(history.operations):,}",
                "calls disturbed": f"{sum(met):,}",
            },
        ),
        supervisor.marks(),
    )


async def _impatient(settings: Settings, kill_at: str, directory: Path) -> Life:
    return await executed({**settings, **IMPATIENT}, kill_at, directory)


async def _story(tmp_path: Path, supervisor: Supervisor, strace: Strace) -> list[int]:
    rng, met, people_talk = random.Random(SEED), [], asyncio.Event()
    chat_id = await supervisor.prepare("ann", "bob")
    await supervisor.spawn()
    assert await supervisor.serving()
    people = [Person(supervisor, user, tmp_path) for user in ("ann", "bob")]
    people_talk.set()
    async with asyncio.timeout(300), people[0].online(), people[1].online():
        talking = [
            asyncio.create_task(talk(person, chat_id, rng, people_talk)) for person in people
        ]
        for name, (calls, fault) in rng.sample([*DISKS.items()] * ROUNDS, len(DISKS) * ROUNDS):
            at = time.monotonic()
            async with strace.injecting(
                supervisor.pid, calls, fault, tmp_path / "strace"
            ) as injection:
                await asyncio.sleep(FAULT_SECONDS)  # how long the trouble lasts
                # or longer: every disk must have been asked while it was in trouble
                await injection.meets()
            met.append(injection.met)
            # Sends may be refused until the breaker has rested and a probe succeeded.
            async with asyncio.timeout(HEALED_SECONDS_MAX):
                await asyncio.gather(
                    *(person.say(chat_id, f"after {name} {len(met)}") for person in people)
                )
            supervisor.record.note(
                FaultWindow(
                    at=at, until=time.monotonic(), plane="durability", name=f"the disk is {name}"
                )
            )
        people_talk.clear()
        await asyncio.gather(*talking)
        await all_have_all(supervisor, people, chat_id)
    await supervisor.kill()
    await supervisor.note_state()
    return met
