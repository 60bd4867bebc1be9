"""What a simulation sees of a server's buffers."""

from __future__ import annotations

from gateway_rig import bench, settle

from holdfast.verify.history import Header, Level, Recorder
from proof.simulation.watch import Watch, watched
from proof.virtual_loop import LoopClock


async def test_bytes_written_to_a_blocked_socket_count_as_waiting() -> None:
    record = Recorder(Header(seed=1, notes={}))
    bounds = {"messages": 1000, "bytes": 6000, "requests": 100}
    watch = Watch(record, LoopClock().monotonic, bounds)
    async with bench(connection_type=watched(watch)) as parts:
        chat_id = await parts.chat("alice", "bob")
        alice = parts.connect("alice")
        await settle()
        alice.stopped, alice.unsent = True, 7000
        alice.say("sync_request", "q", chat_id=chat_id, epoch=1, after_sequence=0)
        await settle()
        levels = [level for level in record.history().of(Level) if level.where.startswith("bytes")]
        assert levels[-1].value == 7000 > levels[-1].bound
