"""One check per HTTP request: a Holdfast node beside a bare ASGI application on the
same uvicorn, one after the other.

As a program (`python bench/single_checks.py holdfast|bare`) it is the server; `compare`
is the load.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import uvloop

from children import obey, used
from harness import CORES, Child, ask, median, process, say

CONNECTIONS = 32
"""Each asks for its own tenant, so that no single tenant's rule is measured."""
BODY = b'{"resource":"send","subject":"user-1"}'
ANSWER = (
    b'{"allowed":true,"limit":1000000,"remaining":999999,"retry_after":0.0,'
    b'"reset_after":0.00006,"rule":"*/send","degraded":false,'
    b'"exceeded":false,"hold":null,"window_seconds":60.0}'
)
"""About what a node answers."""


async def holdfast() -> None:
    """A whole node with counters in memory, logging as `holdfast serve` does."""
    from holdfast import telemetry
    from holdfast.clock import timestamp
    from holdfast.node.lifecycle import running, settle_heap
    from holdfast.settings import load

    with (
        tempfile.TemporaryDirectory(prefix="holdfast-bench-") as state,
        Path(os.devnull).open("w") as log,  # noqa: ASYNC230
    ):
        telemetry.configure_logging(json=True, stream=log)
        async with running(load(None, {}, {"server.port": 0, "server.state_dir": state})) as node:
            rule = {
                "tenantID": "*",
                "resource": "send",
                "algorithm": "token_bucket",
                "limit": 10**9,
                "window": "60s",
            }
            await node.limits.control.create(rule, "bench")
            await node.limits.feed.sync()
            settle_heap()
            at = timestamp(time.time())
            tenants = [f"t{n}" for n in range(CONNECTIONS)]
            keys = [
                (await node.keys.issue("tenant", "bench", at, tenant=tenant))[1]
                for tenant in tenants
            ]
            await obey({"used": used}, {"url": node.url, "keys": keys})


async def bare() -> None:
    """The least an ASGI application can do: read the body, answer."""
    import uvicorn

    async def app(
        scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
    ) -> None:
        while (await receive()).get("more_body"):
            pass
        length = str(len(ANSWER)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": ANSWER})

    config = uvicorn.Config(
        app, port=0, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False,
        log_level="warning", server_header=False, proxy_headers=False,
    )  # fmt: skip
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  # uvicorn has no event for it
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    await obey({"used": used}, {"url": f"http://127.0.0.1:{port}", "keys": ["none"] * CONNECTIONS})
    serving.cancel()


class Asking(asyncio.Protocol):
    """One connection that asks again as soon as it is answered, until it is stopped."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._answer = b""
        self.answers = 0
        self.asking = False
        self.wrong = b""
        self.transport: asyncio.Transport

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def begin(self) -> None:
        self.asking = True
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._answer += data
        if self._answer[-1:] != b"}":  # the rest of the answer is still to come
            return
        if self._answer.startswith(b"HTTP/1.1 200") and b'"allowed":true' in self._answer:
            self.answers += 1
        else:
            self.wrong, self.asking = self._answer, False
        self._answer = b""
        if self.asking:
            self.transport.write(self._request)


class Load:
    """What is asked of one server."""

    def __init__(self, child: Child, asking: list[Asking]) -> None:
        self._child = child
        self._asking = asking

    @classmethod
    async def connect(cls, child: Child, ready: dict[str, Any]) -> Load:
        address, asking = urlsplit(ready["url"]), []
        for key in ready["keys"]:
            head = (
                f"POST /v1/limits/check HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer"
                f" {key}\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
            )
            one = Asking(head.encode() + BODY)
            await asyncio.get_running_loop().create_connection(
                lambda one=one: one, address.hostname, address.port
            )
            asking.append(one)
        return cls(child, asking)

    async def turn(self, seconds: float) -> tuple[float, float]:
        """Answers per second, and microseconds of the server's loop for each."""
        for one in self._asking:
            one.begin()
        await asyncio.sleep(0.2)
        cpu, answers, began = (
            ask(self._child, do="used")["loop_cpu"],
            self._answers(),
            time.perf_counter(),
        )
        await asyncio.sleep(seconds)
        cpu, took = ask(self._child, do="used")["loop_cpu"] - cpu, time.perf_counter() - began
        done = self._answers() - answers
        for one in self._asking:
            one.asking = False
        await asyncio.sleep(0.2)
        wrong = next((one.wrong for one in self._asking if one.wrong), b"")
        assert done and not wrong, f"not answered as it should be: {wrong[:500]!r}"
        return done / took, cpu / done * 1e6

    def _answers(self) -> int:
        return sum(one.answers for one in self._asking)


async def compare(quick: bool, figures: dict[str, float], ratios: dict[str, float]) -> None:
    """In turn; a ratio is the median of its rounds. Each side has one core."""
    seconds, rounds = (1.0, 5) if quick else (3.0, 9)
    results: dict[str, list[tuple[float, float]]] = {"holdfast": [], "bare": []}
    with process(__file__, "holdfast") as ours, process(__file__, "bare") as peer:
        loads = {"holdfast": await Load.connect(*ours), "bare": await Load.connect(*peer)}
        if len(CORES) > 1:
            for child, _ in (ours, peer):
                for thread in psutil.Process(child.pid).threads():
                    os.sched_setaffinity(thread.id, CORES[-1:])
            os.sched_setaffinity(0, CORES[:-1])
        try:
            for _ in range(rounds):
                for name, load in loads.items():
                    results[name].append(await load.turn(seconds))
        finally:
            if len(CORES) > 1:
                os.sched_setaffinity(0, CORES)
    for name, prefix in (("holdfast", "single_http_check"), ("bare", "bare_http_request")):
        figures[f"{prefix}s_per_s"] = median([per_s for per_s, _ in results[name]])
        figures[f"{prefix}_cpu_us"] = median([cpu for _, cpu in results[name]])
    both = zip(results["holdfast"], results["bare"], strict=True)
    ratios["single_http_check_vs_bare"] = median([mine[0] / theirs[0] for mine, theirs in both])
    say(
        "  one check a request:"
        f" {json.dumps({name: [round(r[0]) for r in turns] for name, turns in results.items()})}"
    )


if __name__ == "__main__":
    uvloop.run(holdfast() if sys.argv[1] == "holdfast" else bare())
