"""``holdfast dead``: what could not be delivered (fanout) or done (jobs)."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from holdfast.cli import output
from holdfast.cli.context import ASKED, CliContext, ReasonOption, group, remote_command
from holdfast.cli.jobs import DISCARDED_PER_SECOND, LimitOption, move_dead, report_jobs
from holdfast.cli.rest import RestClient
from holdfast.errors import InvalidMessage, NotFound

dead = group("Dead letters: events that could not be delivered, jobs that were given up.")

LETTERS = "/admin/dead-letters"
LETTERS_AT_ONCE = 1000


class Kind(StrEnum):
    FANOUT = "fanout"
    JOBS = "jobs"


OfOption = Annotated[
    Kind, typer.Option("--of", help="fanout: events of the log; jobs: jobs that were given up.")
]
NumbersArgument = Annotated[
    list[int] | None, typer.Argument(metavar="[NUMBER...]", help="These dead letters.")
]
AllOption = Annotated[bool, typer.Option("--all", help="Every dead letter of that kind.")]


@dead.command("ls")
@remote_command
def list_dead_letters(
    context: CliContext, of: OfOption = Kind.FANOUT, limit: LimitOption = 100
) -> None:
    """List dead letters, newest first.

    Examples:

    \b
      holdfast dead ls
      holdfast dead ls --of jobs
    """
    if of is Kind.JOBS:
        report_jobs(context, "/admin/jobs/dead", {"limit": limit}, empty="No dead letters.")
        return
    found = context.as_operator().get(LETTERS, limit=limit)
    columns = ("number", "at", "reason", "chat", "position", "error")
    rows = (
        (x["number"], x["at"][:19], x["reason"], x["chat_id"] or "–", _position(x), x["cause"])
        for x in found["letters"]
    )
    if context.as_json:
        output.as_json(found)
        return
    output.table(columns, rows, empty="No dead letters.")
    if found["next_before"] is not None:
        output.line(f"… of {sum(found['counts'].values())}")


def _position(letter: dict[str, Any]) -> str:
    return f"{letter['shard']}:{letter['offset']}"


@dead.command("show")
@remote_command
def show_dead_letter(
    context: CliContext,
    number: Annotated[int, typer.Argument(min=1, help="A dead letter's number.")],
    of: OfOption = Kind.FANOUT,
) -> None:
    """Show one dead letter with all that is known of it.

    Examples:

    \b
      holdfast dead show 7
      holdfast dead show 4711 --of jobs
    """
    path = "/admin/jobs" if of is Kind.JOBS else LETTERS
    found = context.as_operator().get(path, str(number))
    output.report_object(
        context, found, {name: value for name, value in found.items() if value not in (None, "")}
    )


@dead.command("replay")
@remote_command
def replay_dead_letters(
    context: CliContext,
    numbers: NumbersArgument = None,
    every: AllOption = False,
    of: OfOption = Kind.FANOUT,
    rate: Annotated[int, typer.Option(min=1, max=1000, help="Jobs: the most per second.")] = 100,
    reason: ReasonOption = ASKED,
) -> None:
    """Have the sessions of their chats compare with the store, or enqueue jobs again;
    exit code 1 if one named is gone.

    Examples:

    \b
      holdfast dead replay 7 8 --reason "upgraded to the version that knows them"
      holdfast dead replay --all --of jobs --rate 50 --reason "the relay is back"
    """
    _apply(context, "replay", numbers, every, of, rate, reason)


@dead.command("discard")
@remote_command
def discard_dead_letters(
    context: CliContext,
    numbers: NumbersArgument = None,
    every: AllOption = False,
    of: OfOption = Kind.FANOUT,
    sure: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    reason: ReasonOption = ASKED,
) -> None:
    """Forget dead letters for good.

    Examples:

    \b
      holdfast dead discard 7 --reason "its chat is gone"
      holdfast dead discard --all --of fanout --yes --reason "clients have synced"
    """
    if not sure and (numbers or every):
        which = "all of them" if every else " ".join(map(str, numbers or ()))
        typer.confirm(f"Forget the dead letters of {of}: {which}?", abort=True, err=True)
    _apply(context, "discard", numbers, every, of, DISCARDED_PER_SECOND, reason)


def _apply(
    context: CliContext,
    verb: str,
    numbers: list[int] | None,
    every: bool,
    of: Kind,
    rate: int,
    reason: str,
) -> None:
    if bool(numbers) == every:
        raise InvalidMessage("say which: dead letters by their numbers, or --all")
    if of is Kind.JOBS:
        done = "enqueued again" if verb == "replay" else "forgotten"
        if every and not context.as_operator().get("/admin/jobs/stats")["dead"]:
            output.report(context, {"count": 0, "missing": []}, f"0 {done}")
        else:
            move_dead(context, verb, {"reason": reason}, numbers, rate, done)
        return
    done = "replayed: sessions compare with the store" if verb == "replay" else "forgotten"
    rest = context.as_operator()
    count, missing = 0, list[int]()
    for chosen in [[number] for number in numbers or ()] or _pages(rest):
        try:
            body = {"numbers": chosen, "reason": reason}
            count += rest.post(f"{LETTERS}/{verb}", body=body)["count"]
        except NotFound:
            missing += chosen
    gone = f"; no such dead letter: {', '.join(map(str, missing))}" if missing and numbers else ""
    output.report(context, {"count": count, "missing": missing}, f"{count} {done}{gone}")
    if missing and numbers:
        raise typer.Exit(1)


def _pages(rest: RestClient) -> list[list[int]]:
    """The numbers of all letters, by request."""
    pages, before = list[list[int]](), None
    while True:
        found = rest.get(LETTERS, limit=LETTERS_AT_ONCE, before=before)
        if found["letters"]:
            pages.append([letter["number"] for letter in found["letters"]])
        if (before := found["next_before"]) is None:
            return pages
