"""Negative controls: broken variants, and the checkers that each must turn red.

- ``message_path``  gateways, sessions, intakes and clients that break a promise
- ``stores``        stores that break a promise
- ``cluster``       parts of several nodes: log, locks, leases
- ``two_phase``     the sequencing of the design documents: allocate, then persist
- ``jobs``          workers that break checker 11
- ``replies``       logs of AI replies and their readers that break checker 15

A control runs in the simulation in place of the part it breaks, under the faults that
reveal the defect. It must turn its own checkers red and no other. A checker that no
control turns red proves nothing; a control that turns others red shows that checkers
overlap. Six controls break more than one promise; their docstrings say why the others
follow from the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from holdfast.gateway.settings import GatewaySettings
from holdfast.session.settings import BackpressureSettings, OutboundSettings
from holdfast.verify.checkers import check, red
from proof.controls.cluster import (
    LateLogDisk,
    PagesWithHoles,
    PublishesWhatItAcks,
    SnapshotStore,
    UnlockedDisk,
    WallClockLeases,
)
from proof.controls.message_path import (
    AgelessGateway,
    CarelessSession,
    CoupledStore,
    CredulousGateway,
    EpochBlindSession,
    ForgetfulIntake,
    HighestAcks,
    SilentConnection,
    SkippingGateway,
)
from proof.controls.stores import (
    DeafStore,
    EarlyAcks,
    ForgetfulStore,
    LaggingReads,
    OpenReads,
    OverwritingStore,
    TwoPhaseStore,
    UnscopedStore,
)
from proof.faults import Odds
from proof.simulation.disk import SimulatedDisk
from proof.simulation.options import QUIET, Options
from proof.simulation.parts import Parts
from proof.simulation.world import play

SEEDS = range(1, 9)


@dataclass(frozen=True, slots=True)
class NegativeControl:
    """A broken variant and the numbers of the checkers that must notice it."""

    name: str
    parts: Parts
    red: frozenset[int]


def turned_red(control: NegativeControl, seeds: Iterable[int] = SEEDS) -> set[int]:
    """The checkers that a control turns red over some seeds."""
    found: set[int] = set()
    for seed in seeds:
        found |= red(check(play(seed, control.parts)))
    return found


def only_faults(**changes: object) -> Callable[[Options], Options]:
    """Much traffic, and no faults but the named ones."""

    def change(options: Options) -> Options:
        traffic: dict[str, object] = {
            "servers": 1,
            "devices": 3,
            "sends_per_device": 12,
            "seconds": 8.0,
            "latency_seconds": 0.02,
            "buffer_messages": 1000,
            "writes": QUIET,
            "reads": QUIET,
            "fanout": QUIET,
        }
        none = (
            "cuts",
            "holes",
            "stalls",
            "device_crashes",
            "server_crashes",
            "pauses",
            "partitions",
            "failovers",
            "epoch_raises",
            "skew_seconds",
            "membership_changes",
            "redactions",
            "bursts",
            "recoveries",
            "halts",
            "retentions",
            "new_chats",
            "log_losses",
            "log_repeats",
            "log_zombies",
            "registry_flushes",
            "registry_restores",
            "bus_noise",
        )
        given = {**dict.fromkeys(none, 0), **traffic, **changes}
        return replace(options, **given)  # type: ignore[arg-type]

    return change


def _boundless(settings: GatewaySettings) -> GatewaySettings:
    outbound = OutboundSettings(max_buffer_messages=10**9, max_buffer_bytes=2**50)
    return replace(settings, backpressure=BackpressureSettings(outbound=outbound))


def _without_comparisons(settings: GatewaySettings) -> GatewaySettings:
    """With heartbeats so rare that none repairs what an entry of the log spoilt."""
    timeouts = replace(settings.timeouts, heartbeat_interval_seconds=1_000.0)
    return replace(settings, timeouts=timeouts)


_REPEATED = only_faults(membership_changes=30, sends_per_device=30, seconds=20.0, log_repeats=0.5)
"""Memberships that change often, and entries that come again."""

CONTROLS = [
    NegativeControl(
        "acks before the commit",
        Parts(around_store=lambda store: EarlyAcks(store), options=only_faults(server_crashes=2)),
        frozenset({1, 3, 5}),
    ),
    NegativeControl(
        "unscoped key",
        Parts(disk=lambda: SimulatedDisk(UnscopedStore()), options=only_faults()),
        frozenset({1}),
    ),
    NegativeControl(
        "keys that expire",
        Parts(
            disk=lambda: SimulatedDisk(ForgetfulStore()),
            options=only_faults(writes=Odds(lost_reply=0.3)),
        ),
        frozenset({2}),
    ),
    NegativeControl(
        "unconditioned put and a counter repaired too low",
        Parts(disk=lambda: SimulatedDisk(OverwritingStore()), options=only_faults()),
        frozenset({1, 3, 9}),
    ),
    NegativeControl(
        "two-phase allocation",
        Parts(disk=lambda: SimulatedDisk(TwoPhaseStore()), options=only_faults()),
        frozenset({4, 9}),
    ),
    NegativeControl(
        "gateway without continuity check",
        Parts(session=CarelessSession, gateway=SkippingGateway, options=only_faults()),
        frozenset({4}),
    ),
    NegativeControl(
        "reads from a lagging copy",
        Parts(around_store=lambda store: LaggingReads(store), options=only_faults()),
        frozenset({5}),
    ),
    NegativeControl(
        "unbounded buffer",
        Parts(
            settings=_boundless,
            options=only_faults(buffer_messages=5, stalls=6, sends_per_device=30),
        ),
        frozenset({6}),
    ),
    NegativeControl(
        "silent close",
        Parts(
            connection=SilentConnection,
            options=only_faults(buffer_messages=5, stalls=6, sends_per_device=30),
        ),
        frozenset({7}),
    ),
    NegativeControl(
        "never answers",
        Parts(intake=ForgetfulIntake, options=only_faults()),
        frozenset({8}),
    ),
    NegativeControl(
        "a retry never publishes",
        Parts(
            disk=LateLogDisk,
            durability=lambda store, clock, _: PublishesWhatItAcks(store, clock),
            options=only_faults(writes=Odds(lost_reply=0.3)),
        ),
        frozenset({9, 11}),
    ),
    NegativeControl(
        "a page with a hole",
        Parts(
            around_store=lambda store: PagesWithHoles(store), options=only_faults(device_crashes=4)
        ),
        frozenset({4, 9}),
    ),
    NegativeControl(
        "positions from a sequence without the shard's lock",
        Parts(disk=UnlockedDisk, options=only_faults(servers=3)),
        frozenset({11}),
    ),
    NegativeControl(
        "members read with the locking statement's snapshot",
        Parts(
            disk=lambda: SimulatedDisk(SnapshotStore()),
            options=only_faults(servers=2, membership_changes=12, sends_per_device=20),
        ),
        frozenset({12}),
    ),
    NegativeControl(
        "leases by two wall clocks",
        Parts(
            leases=WallClockLeases,
            options=only_faults(servers=3, skew_seconds=60.0, sends_per_device=20),
        ),
        frozenset({11}),
    ),
    NegativeControl(
        "a client that acknowledges the highest",
        Parts(device=HighestAcks, options=only_faults()),
        frozenset({9}),
    ),
    NegativeControl(
        "fanout failures reach sends",
        Parts(
            durability=CoupledStore, options=only_faults(fanout=Odds(fail=0.6, seconds_max=0.05))
        ),
        frozenset({10}),
    ),
    NegativeControl(
        "old membership events applied",
        Parts(
            gateway=AgelessGateway,
            settings=_without_comparisons,
            options=_REPEATED,
        ),
        frozenset({9}),
    ),
    NegativeControl(
        "a join applied from a repeated entry",
        Parts(
            gateway=CredulousGateway,
            settings=_without_comparisons,
            options=_REPEATED,
        ),
        frozenset({9}),
    ),
    NegativeControl(
        "an entry of an old epoch delivered",
        Parts(session=EpochBlindSession, options=only_faults(recoveries=3, log_zombies=0.5)),
        frozenset({3, 9}),
    ),
    NegativeControl(
        "takes the sends of muted members",
        Parts(
            disk=lambda: SimulatedDisk(DeafStore()),
            options=only_faults(membership_changes=12, sends_per_device=20),
        ),
        frozenset({12}),
    ),
    NegativeControl(
        "serves whoever asks",
        Parts(around_store=lambda store: OpenReads(store), options=only_faults()),
        frozenset({12}),
    ),
]
