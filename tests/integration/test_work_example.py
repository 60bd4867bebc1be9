"""The example service of the README, run by uvicorn on a real PostgreSQL."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import asyncpg
import httpx
import pytest

from engines import Server, free_port

pytest.importorskip("fastapi")
ROOT = Path(__file__).resolve().parents[2]


def serve(url: str, port: int, log: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "service:app",
        "--port",
        str(port),
        "--log-level",
        "warning",
    ]
    with log.open("ab") as out:
        return subprocess.Popen(
            command,
            cwd=ROOT / "examples" / "orders",
            env={**os.environ, "DATABASE_URL": url, "PYTHONPATH": str(ROOT / "src")},
            stdout=out,
            stderr=out,
        )


async def until_it_listens(port: int, child: subprocess.Popen[bytes], log: Path) -> None:
    async with asyncio.timeout(60):
        while True:
            assert child.poll() is None, f"it ended early; see {log}"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            await asyncio.sleep(0.05)


async def test_orders_are_shipped_and_payments_are_booked_once(
    postgres_server: Server, tmp_path: Path
) -> None:
    connection = await asyncpg.connect(postgres_server.url)
    await connection.execute(
        "DROP SCHEMA IF EXISTS holdfast_work CASCADE; DROP TABLE IF EXISTS orders, ledger"
    )
    port, log = free_port(), tmp_path / "uvicorn.log"
    child = serve(postgres_server.url, port, log)
    try:
        await until_it_listens(port, child, log)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            placed = await client.post("/orders", json={"order_id": "o1", "customer": "ann"})
            assert placed.status_code == 201, placed.text
            again = await client.post("/orders", json={"order_id": "o1", "customer": "ann"})
            assert again.status_code == 409, "and no second job was enqueued"
            paid = {"order_id": "o1", "cents": 500}
            answers = [
                (await client.post("/payments/p1", json=paid)).json()["new"] for _ in range(3)
            ]
            assert answers == [True, False, False]
            async with asyncio.timeout(60):
                while True:
                    order = (await client.get("/orders/o1")).json()
                    if len(order["ledger"]) == 2:
                        break
                    await asyncio.sleep(0.05)
            assert order["state"] == "shipped"
            assert sorted(order["ledger"]) == ["paid 500", "shipped"]
        assert await connection.fetchval("SELECT count(*) FROM holdfast_work.job") == 0
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) in (0, -signal.SIGTERM), "it drains, then ends by the signal"
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        await connection.close()
