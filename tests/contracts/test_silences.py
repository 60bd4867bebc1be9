"""Silences that the nodes of a cluster share."""

from __future__ import annotations

from cluster_database import another_node, first_node
from msgspec.structs import replace

from engines import Server
from holdfast.telemetry.notices import Silence
from holdfast.webhooks.silences.postgres import PostgresSilences

MADE = Silence("HoldfastJobsOld", "2026-01-01T10:00:00.000Z", "import", "key_1")


async def test_silence_of_one_node_is_read_by_another(postgres_server: Server) -> None:
    url = postgres_server.url
    async with first_node(url) as here, another_node(url) as there:
        one, two = await PostgresSilences.open(here), await PostgresSilences.open(there)
        assert await two.read() == []
        await one.put(MADE)
        await one.put(replace(MADE, alert="HoldfastDiskFull"))
        assert await two.read() == [replace(MADE, alert="HoldfastDiskFull"), MADE]


async def test_later_silence_takes_the_place_of_an_earlier_one(postgres_server: Server) -> None:
    async with first_node(postgres_server.url) as here:
        store = await PostgresSilences.open(here)
        await store.put(MADE)
        longer = Silence(MADE.alert, "2026-01-02T10:00:00.000Z", "it goes on", "key_2")
        await store.put(longer)
        assert await store.read() == [longer]
        await store.remove(MADE.alert)
        await store.remove(MADE.alert)
        assert await store.read() == []


async def test_any_reason_can_be_stored(postgres_server: Server) -> None:
    async with first_node(postgres_server.url) as here:
        store = await PostgresSilences.open(here)
        await store.put(replace(MADE, reason="a\0b, half \ud800 a pair"))
        (found,) = await store.read()
        assert found.reason.startswith("a\ufffdb")
