"""``verify``: check a running server's promises, or a saved history."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.access.principal import USER_SCOPES
from holdfast.cli import output
from holdfast.cli.context import CliContext, TenantOption, remote_command
from holdfast.cli.rest import RestClient
from holdfast.errors import BadSetting, InvalidMessage
from holdfast.message import User

if TYPE_CHECKING:
    from holdfast.verify.checkers import Verdict
    from holdfast.verify.history import History
    from holdfast.verify.workload import Account, Workload, WorkloadProgress

_SHOWN_MAX = 3


@remote_command
def verify(
    context: CliContext,
    servers: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL", help="The server, or nodes of a cluster; else --url."),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Judge this saved history again; no server is asked."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="How long to talk.")] = 10,
    history: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Keep what was done and seen; contents are kept as digests."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Draw the same sends and cuts again.")] = None,
    tenant: TenantOption = "default",
) -> None:
    """See whether a running server keeps its promises, with chats of its own; exit code
    0 only if it keeps them all.

    Three devices talk in two new chats, their connections are cut, some messages are
    sent twice under one id, and a stranger tries to read and write. Users are made up,
    with a tenant API key (--token-file) or the secret of the state directory; with a
    user token, all devices are that user's and nobody is a stranger. In the end
    everybody leaves the chats and, with the state directory, their messages are
    deleted; it says what is left.

    Examples:

    \b
      holdfast verify
      holdfast verify https://chat.example.org --token-file tenant.key --seconds 60
      holdfast verify http://10.0.0.11:8080 http://10.0.0.12:8080 --token-file tenant.key
      holdfast verify --history verify.jsonl
      holdfast verify --replay verify.jsonl
    """
    if replay is not None:
        if servers or history is not None:
            raise InvalidMessage(
                "--replay judges a file and asks no server: leave the URL and --history out"
            )
        _print_verdicts(context, _loaded(replay), left=[])
        return
    workload = _workload(context, servers or [context.address], tenant, seconds, seed)
    try:
        with output.progress(context) as moved:
            asyncio.run(
                workload.run(
                    lambda now: moved(_progress_text(now), min(now.seconds, seconds), seconds)
                )
            )
    finally:
        if history is not None:
            _save(workload, history)
    _print_verdicts(context, workload.record.history(), workload.left)


def _loaded(file: Path) -> History:
    from holdfast.verify.history import load

    try:
        return load(file)
    except (OSError, ValueError) as error:
        raise BadSetting(f"{file} cannot be judged: {error}") from None


def _save(workload: Workload, history: Path) -> None:
    try:
        workload.record.save(history)
    except OSError as error:
        raise BadSetting(f"{history} cannot be written: {error.strerror}") from None


def _progress_text(now: WorkloadProgress) -> str:
    return f"{now.doing}: {now.sends} sends, {now.cuts} cuts"


def _workload(
    context: CliContext, urls: list[str], tenant: str, seconds: float, seed: int | None
) -> Workload:
    from holdfast.verify.workload import Workload, WorkloadSettings

    members, stranger = _accounts(context, urls, tenant)
    chosen = secrets.randbelow(10**6) if seed is None else seed
    operator = None if context.token else replace(context, url=urls[0]).as_operator()
    return Workload(urls, members, stranger, WorkloadSettings(seconds=seconds), chosen, operator)


def _accounts(
    context: CliContext, urls: list[str], tenant: str
) -> tuple[list[Account], Account | None]:
    """Two members and a stranger, or the token's own user; each asks another node."""
    from holdfast.client.connection import claims_of
    from holdfast.verify.workload import Account

    token = context.token
    if token and token.startswith("hf_admin_"):
        raise InvalidMessage(
            "an admin key cannot talk: use a tenant key, a user token, or the state directory"
        )
    if token and not token.startswith("hf_tenant_"):
        claims = claims_of(token)
        return [
            Account(
                User(claims.tenant or "default", claims.sub or ""),
                token,
                RestClient(urls[0], token),
            )
        ], None
    run, nodes = secrets.token_hex(3), cycle(urls)

    def account(name: str) -> Account:
        url = next(nodes)
        user = f"verify-{run}-{name}"
        made = (
            _minted(RestClient(url, token), user) if token else context.mint(user, tenant, hours=2)
        )
        claimed = claims_of(made).tenant or "default"
        return Account(User(claimed, user), made, RestClient(url, made))

    return [account("ann"), account("bob")], account("eve")


def _minted(rest: RestClient, user: str) -> str:
    body = {"user_id": user, "ttl_seconds": 7200, "scopes": sorted(USER_SCOPES)}
    return str(rest.post("/v1/tokens", body=body)["token"])


def _print_verdicts(context: CliContext, history: History, left: list[str]) -> None:
    from holdfast.verify.checkers import CHECKERS
    from holdfast.verify.history import Header

    header = history.events[0]
    named = header.notes.get("checkers") if isinstance(header, Header) else None
    verdicts = {number: CHECKERS[number](history) for number in named or CHECKERS}
    kept = all(verdict.ok for verdict in verdicts.values()) and any(history.acks())
    if context.as_json:
        output.as_json(_report(history, verdicts, kept, left))
    else:
        rows = [
            (number, verdict.name, verdict.examined, _verdict_text(verdict))
            for number, verdict in verdicts.items()
        ]
        output.table(("", "promise", "facts", ""), rows, empty="nothing was judged")
        for verdict in verdicts.values():
            for violation in verdict.violations[:_SHOWN_MAX]:
                output.line(f"\n{verdict.name}: {violation}")
        if not any(history.acks()):
            output.line("not one message was acknowledged, so that nothing is proved")
        for chat in left:
            output.line(f"left on the server: {chat}")
    if not kept:
        raise typer.Exit(1)


def _verdict_text(verdict: Verdict) -> str:
    if not verdict.ok:
        return f"BROKEN ({len(verdict.violations)} times)"
    return "kept" if verdict.examined else "nothing to judge"


def _report(
    history: History, verdicts: dict[int, Verdict], kept: bool, left: list[str]
) -> dict[str, Any]:
    return {
        "kept": kept,
        "operations": len(history.operations),
        "promises": [
            {
                "number": number,
                "promise": verdict.name,
                "kept": verdict.ok,
                "facts": verdict.examined,
                "violations": [str(violation) for violation in verdict.violations[:_SHOWN_MAX]],
            }
            for number, verdict in verdicts.items()
        ],
        "left": left,
    }
