"""``holdfast ask``, ``replies`` and ``usage``: AI replies for users and operators."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, NoReturn

import msgspec
import typer

from holdfast.cli import output
from holdfast.cli.context import (
    ASKED,
    CliContext,
    ReasonOption,
    TenantOption,
    UserOption,
    group,
    remote_command,
)
from holdfast.cli.reply_stream import AskedReply, ReplyEvent
from holdfast.cli.rest import RestClient
from holdfast.clock import Ids, SystemClock
from holdfast.errors import HoldfastError, InvalidMessage

replies = group("AI replies that wait or run.")

INTERRUPTED = 130
"""The exit code after Ctrl-C."""
NOT_RETRYABLE = ("cancelled", "upstream_refused")
PAGE = 1000


@remote_command
def ask(
    context: CliContext,
    text: Annotated[
        str | None, typer.Argument(help="What to ask; left out: all of standard input.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The model; left out: the server's first.")
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="Instructions for the model.")
    ] = None,
    stream: Annotated[
        bool,
        typer.Option("--stream/--no-stream", help="Print the text as it comes, or whole."),
    ] = True,
    user: UserOption = None,
    tenant: TenantOption = "default",
) -> None:
    """Ask a model and print its reply.

    While it waits for its turn, its place in the queue is shown. After a dropped
    connection the reply goes on where it was. Ctrl-C cancels it. Exit code 1 if the
    reply failed, 130 if it was cancelled by Ctrl-C.

    Examples:

    \b
      holdfast ask --user alice "Why is the sky blue?"
      holdfast ask --user alice --model fast --system "Answer in French." < question.txt
      holdfast ask --user alice --json "Name three rivers" > answer.json
    """
    messages = [{"role": "user", "content": _question(text)}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    rest = context.as_user(user, tenant)
    body = {"model": model or _first_model(rest), "messages": messages}
    reply = AskedReply.start(rest, body, Ids(SystemClock()).new("ask_"))
    screen = _ReplyScreen(prints=not context.as_json, streams=stream)
    try:
        for event in reply.events():
            screen.show(event)
    except KeyboardInterrupt:
        screen.end()
        typer.echo("Cancelled.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except HoldfastError:
        screen.end()
        raise
    finally:
        reply.cancel()
    screen.end()
    if screen.failure is not None:
        _fail(context, screen.failure)
    if context.as_json:
        shown = {"id": reply.reply_id, "model": body["model"], "text": screen.text}
        output.as_json({**shown, "finish_reason": screen.finish_reason, "usage": screen.usage})
    elif screen.finish_reason == "length":
        typer.echo("(The model stopped at its token limit.)", err=True)


def _fail(context: CliContext, failure: Mapping[str, Any]) -> NoReturn:
    """How the reply ended, on stderr; what came of it is on stdout."""
    if context.as_json:
        error = {**failure, "retryable": failure["code"] not in NOT_RETRYABLE}
        typer.echo(msgspec.json.encode({"error": error}).decode(), err=True)
    else:
        typer.echo(f"Error: {failure['message']} ({failure['code']})", err=True)
    raise typer.Exit(1)


def _question(text: str | None) -> str:
    if text is None:
        if sys.stdin.isatty():
            raise InvalidMessage('say what to ask: holdfast ask "…", or give it on standard input')
        text = sys.stdin.read()
    if not text.strip():
        raise InvalidMessage("there is nothing to ask: the text is empty")
    return text


def _first_model(rest: RestClient) -> str:
    models = rest.get("/v1/models")["data"]
    if not models:
        raise InvalidMessage("this server has no models: set streaming.models")
    return str(models[0]["id"])


class _ReplyScreen:
    """Prints a reply's text on stdout and its progress on a terminal's stderr.

    ``streams``: as it comes, else at its end.
    """

    def __init__(self, *, prints: bool, streams: bool) -> None:
        self._prints = prints
        self._streams = prints and streams
        self._has_note = False
        self.text = ""
        self.finish_reason: str | None = None
        self.usage: Any = None
        self.failure: Mapping[str, Any] | None = None

    def show(self, event: ReplyEvent) -> None:
        match event.name:
            case "queued":
                eta = event.data.get("eta_seconds")
                soon = f", about {eta:.0f} s" if eta is not None else ""
                self._note(f"waiting: place {event.data['position']} in the queue{soon}")
            case "dropped":
                self._note("the connection was lost; connecting again")
            case "delta":
                self._add(event.data)
            case "usage":
                self.usage = dict(event.data)
            case "failed":
                self.failure = event.data

    def end(self) -> None:
        """Print what is not printed yet, and end the line."""
        self._clear()
        if self._prints and self.text:
            rest = "" if self._streams else _safe(self.text)
            typer.echo(rest, nl=not self.text.endswith("\n"))

    def _add(self, chunk: Any) -> None:
        for choice in chunk.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            text = (choice.get("delta") or {}).get("content") or ""
            if text and self._streams:
                self._clear()
                typer.echo(_safe(text), nl=False)
            self.text += text

    def _note(self, text: str) -> None:
        """One line that the next replaces."""
        if self._prints and sys.stderr.isatty():
            typer.echo(f"\r\x1b[K{text}", nl=False, err=True)
            self._has_note = True

    def _clear(self) -> None:
        if self._has_note:
            typer.echo("\r\x1b[K", nl=False, err=True)
            self._has_note = False


def _safe(text: str) -> str:
    """On a terminal, text that cannot move the cursor or add colour; else as it is."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


@replies.command("ls")
@remote_command
def list_replies(
    context: CliContext,
    state: Annotated[str | None, typer.Option(help="waiting, running or ended.")] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only of this tenant.")] = None,
    owner: Annotated[str | None, typer.Option("--owner", help="Only of this user or key.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Only of this model.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="The most to show.")] = 100,
) -> None:
    """List the replies that wait or run on the node that answers; never their text.

    Examples:

    \b
      holdfast replies ls
      holdfast replies ls --state waiting --tenant acme
    """
    asked = {"state": state, "tenant": tenant, "owner": owner, "model": model}
    page, found = _pages(context.as_operator(), "/admin/replies", "replies", asked, limit)
    output.report_rows(
        context, {**page, "replies": found},
        ("reply", "state", "place", "tenant", "owner", "kind", "model", "age", "readers", "node"),
        (
            (
                r["reply_id"], r["state"], r["position"] or "–", r["tenant"], _owner(r), r["kind"],
                r["model"], f"{r['age_seconds']:.0f} s", r["readers"], r["node"],
            )
            for r in found
        ),
        empty="No such replies on this node.",
    )  # fmt: skip
    others = [node for node in page["nodes"] if node != page["node"]]
    if others and not context.as_json:
        output.line(f"Of {page['node']}; ask the others with --url: {', '.join(others)}")


def _owner(reply: Mapping[str, Any]) -> str:
    return f"key {reply['owner']}" if reply["owner_kind"] == "key" else str(reply["owner"])


ReplyArgument = Annotated[str, typer.Argument(metavar="REPLY", help="A reply's id.")]


@replies.command("show")
@remote_command
def show_reply(context: CliContext, reply: ReplyArgument) -> None:
    """Show one reply: whose it is, its model, state, age and node; never its text.

    Example:

    \b
      holdfast replies show reply_01KB3C9V6ZJ8Q2N4T5W7X9Y0AB
    """
    output.report_object(context, context.as_operator().get("/admin/replies", reply))


@replies.command("cancel")
@remote_command
def cancel_reply(context: CliContext, reply: ReplyArgument, reason: ReasonOption = ASKED) -> None:
    """Cancel a reply, on whichever node it runs; its readers get the error `cancelled`.

    Example:

    \b
      holdfast replies cancel reply_01KB3C9V6ZJ8Q2N4T5W7X9Y0AB --reason "runaway"
    """
    path = ("/admin/replies", reply, "cancel")
    answer = context.as_operator().post(*path, body={"reason": reason})
    output.report(context, answer, "cancelled" if answer["cancelled"] else "it had ended already")


DayOption = Annotated[str | None, typer.Option("--day", metavar="DAY", help="Only this day.")]


@remote_command
def usage(
    context: CliContext,
    day: DayOption = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="DAY", help="From this day on.")
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="DAY", help="Up to this day.")
    ] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only of this tenant.")] = None,
    user: Annotated[
        str | None, typer.Option("--user", "-u", help="Only of this user, or key:ID.")
    ] = None,
) -> None:
    """Show the tokens that AI replies used, by day, tenant, user, model and provider.

    Of the replies that the answering node made, in the last 30 days unless days (UTC)
    are named. Estimated: how many replies count by an estimate, because their provider
    reported no numbers.

    Examples:

    \b
      holdfast usage
      holdfast usage --day 2026-05-31 --tenant acme
      holdfast usage --since 2026-05-01 --user alice --json
    """
    if day and (since or until):
        raise InvalidMessage("give --day, or --since and --until")
    asked = {"since": day or since, "until": day or until, "tenant": tenant, "user": user}
    page, rows = _pages(context.as_operator(), "/admin/usage", "rows", asked)
    sums = {name: sum(row[name] for row in rows) for name in NUMBERS}
    if context.as_json:
        output.as_json({"node": page["node"], "rows": rows, "total": sums})
        return
    lines = [[row[name] or "–" for name in NAMES] + [row[name] for name in NUMBERS] for row in rows]
    if len(rows) > 1:
        lines.append(["total", "", "", "", "", *sums.values()])
    columns = [name.removesuffix("_tokens") for name in (*NAMES, *NUMBERS)]
    output.table(columns, lines, empty="No replies were made in that time.")


NAMES = ("day", "tenant", "user", "model", "provider")
NUMBERS = ("replies", "prompt_tokens", "completion_tokens", "estimated")


def _pages(
    rest: RestClient, path: str, name: str, asked: Mapping[str, Any], limit: int | None = None
) -> tuple[Any, list[Any]]:
    """The last page, and what all pages list, up to ``limit``."""
    found, after = list[Any](), None
    while True:
        wanted = PAGE if limit is None else min(PAGE, limit - len(found))
        page = rest.get(path, **asked, after=after, limit=wanted)
        found += page[name]
        after = page["next"]
        if after is None or len(found) == limit:
            return page, found
