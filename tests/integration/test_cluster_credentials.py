"""Real nodes on one PostgreSQL: tokens, API keys and revocations of one hold at all."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from pathlib import Path

from cluster_database import new_database
from program import Program, Ran, eventually

from engines import Server
from holdfast.cli.rest import RestClient

SEEN_SECONDS_MAX = 20.0
"""Keys are read every 5 s, and the machine may be slow."""


class ClusterNode:
    """One node, and commands on its machine."""

    def __init__(self, folder: Path, url: str, token_key: str) -> None:
        folder.mkdir()
        self.folder = folder
        self.program = Program(folder / "state")
        keys, self.config = folder / "token-keys", folder / "holdfast.toml"
        keys.write_text(token_key)
        keys.chmod(0o600)
        self.config.write_text(
            f'[cluster]\npostgres = "{url}"\n[access.tokens]\nsecret_file = "{keys}"\n'
            f'[server]\nport = {self.program.port}\nstate_dir = "{self.program.state_dir}"\n'
        )

    def serve(self) -> None:
        self.program.serve("-c", str(self.config))

    def run(self, *arguments: str, key: str = "") -> Ran:
        """A command with the node's settings; ``key``: with this credential."""
        file = self.folder / "credential"
        file.write_text(key)
        given = ("--token-file", str(file)) if key else ()
        return self.program.run(*arguments, *given, "-c", str(self.config))

    def ok(self, *arguments: str, key: str = "") -> str:
        done = self.run(*arguments, key=key)
        assert done.returncode == 0, f"{arguments}: {done.stderr}"
        return done.stdout

    @property
    def secrets(self) -> Path:
        return self.program.state_dir / "secrets.json"


def test_credentials_of_one_node_hold_at_all_and_a_stopped_node_makes_a_key(
    postgres_server: Server, tmp_path: Path
) -> None:
    url = asyncio.run(new_database(postgres_server, "credentials"))
    one, two = (ClusterNode(tmp_path / name, url, "k" * 32) for name in ("one", "two"))
    with ExitStack() as stack:
        for node in (one, two):
            stack.callback(node.program.stop)
            node.serve()
        assert one.secrets.exists() and not two.secrets.exists()

        token = one.ok("token", "--user", "ann").strip()
        two.ok("chat", "ls", key=token)
        admin_key = json.loads(one.secrets.read_text())["admin_key"]
        two.ok("key", "ls", key=admin_key)
        refused = two.run("key", "ls")
        assert refused.returncode != 0 and "give a key with --token-file" in refused.stderr

        made = two.ok("key", "create", "admin", "--label", "there", key=admin_key).split()[0]
        one.ok("ban", "ann", "--reason", "over")
        eventually(lambda: two.run("chat", "ls", key=token).returncode != 0, "the ban")

        two.program.stop()
        own = two.ok("key", "create", "admin", "--label", "of two", "--reason", "no other").split()
        assert json.loads(two.secrets.read_text()) == {"jwt_secret": "", "admin_key": own[0]}
        eventually(
            lambda: one.run("key", "ls", key=own[0]).returncode == 0, "the key", SEEN_SECONDS_MAX
        )
        audit = RestClient(one.program.url, made).get("/admin/audit")["records"]
        assert [each["reason"] for each in audit if "stopped" in each["details"]] == ["no other"]

        stranger = ClusterNode(tmp_path / "stranger", url, "x" * 32)
        failed = stranger.program.run_process("serve", "-c", str(stranger.config))
        assert failed.returncode != 0 and "copy the file from a node that runs" in failed.stderr
        assert "x" * 32 not in failed.stderr
