"""``serve``: start a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.context import reporting_errors, settings_of
from holdfast.errors import BadSetting


def serve(
    ctx: typer.Context,
    host: Annotated[
        str | None, typer.Option(help="The address to listen on.  [default: 127.0.0.1]")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="The port for HTTP and WebSocket.  [default: 8080]")
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(help="Where everything is kept.  [default: ~/.local/state/holdfast]"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "-c", "--config", envvar="HOLDFAST_CONFIG", help="A settings file, TOML or YAML."
        ),
    ] = None,
    roles: Annotated[
        str | None,
        typer.Option(
            help="What this node does, of gateway,ingest,streaming,work,admin.  [default: all]"
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="One setting; may be repeated."),
    ] = None,
) -> None:
    """Start a server; with nothing configured: on this machine only, SQLite storage,
    its own secrets.

    Every setting can also be given as HOLDFAST_… in the environment, with __ between
    the parts of its path.

    Examples:

    \b
      holdfast serve
      holdfast serve --port 9000 --state-dir ./state
      holdfast serve -c cluster.toml --roles gateway,ingest
      holdfast serve --set gateway.timeouts.heartbeat_interval_seconds=10
    """
    from holdfast.node.lifecycle import run_node

    with reporting_errors(as_json=False):
        config, state_dir = (
            config or _given_before_serve(ctx, "config"),
            state_dir or _given_before_serve(ctx, "state_dir"),
        )
        named = {
            "server.host": host,
            "server.port": port,
            "server.state_dir": str(state_dir) if state_dir else None,
            "server.roles": roles,
        }
        overrides: dict[str, object] = {**named, **_changes(changes or [])}
        run_node(settings_of(config, overrides), typer.echo)


def _given_before_serve(ctx: typer.Context, name: str) -> Path | None:
    """An option given before the word ``serve`` counts as if given after it."""
    outer = ctx.parent
    if outer is None or getattr(outer.get_parameter_source(name), "name", "") != "COMMANDLINE":
        return None
    return Path(outer.params[name])


def _changes(given: list[str]) -> dict[str, object]:
    changes: dict[str, object] = {}
    for text in given:
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise BadSetting(f"--set takes PATH=VALUE, not {text!r}")
        changes[path] = value
    return changes
