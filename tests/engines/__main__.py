"""``python -m engines [name ...]``: start engines and keep them until Ctrl-C."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

from engines import Missing, Server, postgres, redis

ENGINES: dict[str, Callable[[], Server]] = {"postgres": postgres.start, "redis": redis.start}


def main(names: list[str]) -> int:
    servers: list[Server] = []
    try:
        for name in names or list(ENGINES):
            try:
                servers.append(ENGINES[name]())
                print(f"{name:10} {servers[-1].url}   pid {servers[-1].pid}", flush=True)
            except Missing as error:
                print(f"{name:10} missing: {error}", flush=True)
        print("Ctrl-C stops them.", flush=True)
        if servers:
            signal.sigwait({signal.SIGINT, signal.SIGTERM})
    finally:
        for server in servers:
            server.stop()
    return 0 if servers else 1


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    sys.exit(main(sys.argv[1:]))
