"""Real nodes that share one secret and key ring: tokens and keys of one are good at all,
and keys change in one place.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

from program import Program
from streaming_rig import streaming_rig
from work_rigs import until

REVOKED_SECONDS_MAX = 5.0


async def test_keys_of_one_node_are_good_at_the_others_and_changed_only_there(
    tmp_path: Path,
) -> None:
    async with asyncio.timeout(60), streaming_rig(tmp_path, nodes=2, with_redis=False) as rig:
        first, second = (node.program for node in rig.nodes)

        def status(program: Program, key: str) -> int:
            (tmp_path / "key").write_text(key)
            done = program.run(
                *("chat", "ls", "--user", "ann", "--token-file", str(tmp_path / "key"))
            )
            return done.returncode

        token = first.ok("token", "--user", "ann", "--tenant", "acme").strip()
        assert status(second, token) == 0, "a token signed with the first node's secret"

        made = first.ok("key", "create", "admin", "--label", "watch", "--scope", "status:read")
        (tmp_path / "watch").write_text(made.split()[0])
        watch = ("status", "--json", "--token-file", str(tmp_path / "watch"))
        await until(lambda: second.run(*watch).returncode == 0)

        secrets = json.loads((first.state_dir / "secrets.json").read_text())
        (tmp_path / "operator").write_text(secrets["admin_key"])
        operator = ("--token-file", str(tmp_path / "operator"))
        refused = second.run("key", "create", "admin", "--label", "here", *operator)
        assert refused.returncode != 0 and "access.credentials_dir" in refused.stderr

        [key_id] = [
            line.split()[0] for line in first.ok("key", "ls").splitlines() if "watch" in line
        ]
        first.ok("key", "revoke", key_id, "--reason", "over")
        revoked = time.monotonic()
        await until(lambda: second.run(*watch).returncode != 0)
        assert time.monotonic() - revoked < REVOKED_SECONDS_MAX
