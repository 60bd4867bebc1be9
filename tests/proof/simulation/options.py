"""Everything that a seed decides, in one value that is printed when a seed fails."""

from __future__ import annotations

import random
from dataclasses import dataclass

from proof.faults import Odds
from proof.simulation.shared import BusOdds

SAFETY_SECONDS_MAX = {1: 30.0, 2: 20.0, 3: 15.0}
"""By servers: a turn of each costs as much, and their faults take longer to end."""
SERVERS_MAX = 3


@dataclass(frozen=True, slots=True)
class Options:
    """One simulated run. Counts of faults and crashes are over the whole safety phase.

    Each kind of fault is off in about half of all seeds, so that the parts it must not
    affect are judged strictly.
    """

    seed: int
    servers: int
    devices: int
    chats: int
    sends_per_device: int
    seconds: float
    latency_seconds: float
    buffer_messages: int
    cuts: int
    holes: int
    stalls: int
    device_crashes: int
    server_crashes: int
    outage_seconds: float
    """How long a killed server may stay down."""
    pauses: int
    """SIGSTOP of one server, for longer than its leases."""
    partitions: int
    """One server cannot reach some of what all share, perhaps in one direction."""
    failovers: int
    """Of the shared store, perhaps to a copy that is behind."""
    epoch_raises: int
    """Of all chats, by an operator."""
    skew_seconds: float
    """How wrong the wall clock of a server may be."""
    membership_changes: int
    redactions: int
    bursts: int
    writes: Odds
    reads: Odds
    fanout: Odds
    recoveries: int
    halts: int
    retentions: int
    lanes: int
    """Shards of the store and its log; unless a control brings its own."""
    new_chats: int
    log_losses: float
    """Of the batches of the log."""
    log_repeats: float
    log_zombies: float
    """Of its entries."""
    registry_flushes: int
    registry_restores: int
    """An old copy of it is put back."""
    bus: BusOdds
    bus_noise: int
    """Payloads of other nodes: notes about anybody, and garbage."""

    @staticmethod
    def derive(seed: int) -> Options:
        rng = random.Random(seed)
        often = rng.random

        def some(most: int) -> int:
            return rng.randint(1, most) if often() < 0.5 else 0

        stalls, buffer_messages = some(2), rng.choice([5, 20, 1000])
        slow = stalls > 0 and buffer_messages == 5
        servers = seed % SERVERS_MAX + 1
        return Options(
            seed=seed,
            servers=servers,
            devices=rng.randint(2, 4),
            chats=rng.randint(1, 2),
            sends_per_device=rng.randint(10, 20) if slow else rng.randint(3, 10),
            seconds=rng.uniform(5, SAFETY_SECONDS_MAX[servers]),
            latency_seconds=rng.choice([0.0, 0.001, 0.02, 0.15]),
            buffer_messages=buffer_messages,
            cuts=some(4),
            holes=some(2),
            stalls=stalls,
            device_crashes=some(2),
            server_crashes=some(2),
            outage_seconds=rng.choice([2.0, 2.0, 25.0]) if servers > 1 else 2.0,
            pauses=some(1),
            partitions=some(2),
            failovers=some(1),
            epoch_raises=some(1) if often() < 0.3 else 0,
            skew_seconds=rng.choice([0.0, 60.0]),
            membership_changes=some(4),
            redactions=some(2),
            bursts=some(3),
            writes=_store_odds(rng),
            reads=_store_odds(rng),
            fanout=_fanout_odds(rng),
            recoveries=some(2),
            halts=some(1),
            retentions=some(1),
            lanes=rng.choice([1, 4]) if servers == 1 else 4,
            new_chats=some(1),
            log_losses=rng.choice([0.0, 0.0, 0.02, 0.2]),
            log_repeats=rng.choice([0.0, 0.3]),
            log_zombies=rng.choice([0.0, 0.3]),
            registry_flushes=some(2),
            registry_restores=some(1),
            bus=rng.choice([BusOdds(), BusOdds(lose=0.3, repeat=0.3, late=0.3)]),
            bus_noise=some(5),
        )


QUIET = Odds()


def _store_odds(rng: random.Random) -> Odds:
    if rng.random() < 0.5:
        return QUIET
    return Odds(
        fail=rng.choice([0.0, 0.05, 0.3]),
        delay=rng.choice([0.0, 0.2]),
        hang=rng.choice([0.0, 0.03]),
        lost_reply=rng.choice([0.0, 0.05, 0.2]),
        late_reply=rng.choice([0.0, 0.1]),
        throttle=rng.choice([0.0, 0.05]),
        seconds_max=rng.choice([0.05, 1.0, 3.0]),
    )


def _fanout_odds(rng: random.Random) -> Odds:
    """A log and a registry know only one error: not reached."""
    if rng.random() < 0.5:
        return QUIET
    return Odds(
        fail=rng.choice([0.0, 0.2, 0.7]),
        delay=rng.choice([0.0, 0.2]),
        late_reply=rng.choice([0.0, 0.1]),
        seconds_max=rng.choice([0.05, 2.0]),
    )
