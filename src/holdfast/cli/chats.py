"""The commands about chats, for members and for operators."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

from holdfast.cli import output
from holdfast.cli.context import (
    CliContext,
    ReasonOption,
    TenantOption,
    UserOption,
    chat_id_of,
    group,
    remote_command,
)
from holdfast.cli.rest import RestClient
from holdfast.clock import Ids, SystemClock
from holdfast.errors import HoldfastError, InvalidMessage, NotFound

chat = group("Talk, and look after chats.")

ChatArgument = Annotated[
    str, typer.Argument(metavar="CHAT", help="A chat's id, or its title if only one has it.")
]
SEND_TRIES = 4


class RoleChoice(StrEnum):
    member = "member"
    admin = "admin"
    owner = "owner"


@chat.command("ls")
@remote_command
def list_chats(
    context: CliContext,
    hot: Annotated[
        bool,
        typer.Option("--hot", help="The busiest of all, with their messages in the last minute."),
    ] = False,
    halted: Annotated[
        bool, typer.Option("--halted", help="All that take no messages, and why.")
    ] = False,
    user: UserOption = None,
    tenant: TenantOption = "default",
) -> None:
    """List a user's chats, newest activity first; or, for an operator, the chats that
    are hot or halted.

    Examples:

    \b
      holdfast chat ls --user alice
      holdfast chat ls --hot
      holdfast chat ls --halted
    """
    if hot or halted:
        (_list_hot if hot else _list_halted)(context)
        return
    chats = _all_chats(context.as_user(user, tenant))
    output.report_rows(
        context, chats,
        ("chat", "title", "role", "members", "unread", "last message"),
        (
            (
                entry["chat"]["chat_id"], entry["title"], entry["role"], entry["members"],
                _unread(entry),
                output.message_line(entry["last_message"]) if entry["last_message"] else "",
            )
            for entry in chats
        ),
        empty="No chats yet. Make one: holdfast chat create --user NAME --name lobby",
    )  # fmt: skip


@chat.command()
@remote_command
def create(
    context: CliContext,
    name: Annotated[str, typer.Option("--name", "-n", help="The chat's name.")] = "",
    members: Annotated[
        list[str] | None, typer.Option("--member", "-m", help="Somebody to add; repeatable.")
    ] = None,
    direct: Annotated[
        str | None, typer.Option("--direct", help="A chat of two with this user.")
    ] = None,
    user: UserOption = None,
    tenant: TenantOption = "default",
) -> None:
    """Create a chat and print its id.

    Examples:

    \b
      holdfast chat create --user alice --name lobby --member bob --member carol
      holdfast chat create --user alice --direct bob
    """
    if direct and (name or members):
        raise InvalidMessage(
            "a direct chat has no name and no further members: give --direct alone"
        )
    body = (
        {"kind": "direct", "members": [direct]}
        if direct
        else {"name": name, "members": members or []}
    )
    made = context.as_user(user, tenant).post("/v1/chats", body=body)["chat"]
    output.report(context, made, made["chat_id"])


@chat.command()
@remote_command
def invite(
    context: CliContext,
    chat_name: ChatArgument,
    who: Annotated[str, typer.Argument(metavar="USER", help="Whom to add.")],
    role: Annotated[RoleChoice, typer.Option(help="What they may do.")] = RoleChoice.member,
    user: UserOption = None,
    tenant: TenantOption = "default",
) -> None:
    """Add somebody to a chat.

    Example:

    \b
      holdfast chat invite lobby dave --user alice
    """
    rest = context.as_user(user, tenant)
    body = {"user_id": who, "role": role.value}
    changed = rest.post("/v1/chats", _chat_id(rest, chat_name), "members", body=body)
    output.report(
        context,
        changed,
        f"{who} is now {role.value} of {changed['chat']['name'] or changed['chat']['chat_id']}",
    )


@chat.command("open")
@remote_command
def open_chat(
    context: CliContext,
    chat_name: ChatArgument,
    history: Annotated[
        int, typer.Option(min=0, max=500, help="How many earlier messages to show.")
    ] = 20,
    user: UserOption = None,
    tenant: TenantOption = "default",
) -> None:
    """Talk: shows what was said and what comes, sends what you type. Ctrl+D leaves.

    Survives the server being killed and restarted: what you type meanwhile waits on
    disk (shown dim, with …) and is marked ✓ when the server has it. A terminal opens a
    chat, by its id, without a server too. Input may be a pipe: then it ends when every
    line has arrived. Only this chat counts as delivered to you here, no other.

    Examples:

    \b
      holdfast chat open lobby --user alice
      printf 'one\\ntwo\\n' | holdfast chat open lobby --user bob
    """
    from holdfast.cli.terminal_chat import Room, run_chat

    rest = context.as_user(user, tenant)
    room = Room(
        rest=rest,
        token=lambda: context.user_token(user, tenant),
        renewable=context.token is None,
        chat_id=_chat_id(rest, chat_name),
        history=history,
        state_dir=context.state_path,
        as_json=context.as_json,
    )
    asyncio.run(run_chat(room))


@chat.command()
@remote_command
def send(
    context: CliContext,
    chat_name: ChatArgument,
    text: Annotated[str, typer.Argument(help='What to say; "-" reads it from stdin.')],
    markdown: Annotated[bool, typer.Option("--markdown", help="The text is Markdown.")] = False,
    key: Annotated[
        str | None, typer.Option(help="The idempotency key; repeat it to be sure of sending once.")
    ] = None,
    user: UserOption = None,
    tenant: TenantOption = "default",
) -> None:
    """Send one message; it is on the server's disk when this returns.

    Examples:

    \b
      holdfast chat send lobby "hello" --user alice
      date | holdfast chat send lobby - --user alice --key today
    """
    content = sys.stdin.read().rstrip("\n") if text == "-" else text
    rest = context.as_user(user, tenant)
    body = {"content": content, "content_type": "text/markdown" if markdown else "text/plain"}
    path = ("/v1/chats", _chat_id(rest, chat_name), "messages")
    ack = _send(rest, path, body, key or Ids(SystemClock()).new("cmsg_"))
    again = " (it had been sent before)" if ack["deduplicated"] else ""
    output.report(context, ack, f"sent as message {ack['sequence']} of {ack['chat_id']}{again}")


@chat.command()
@remote_command
def history(
    context: CliContext,
    chat_name: ChatArgument,
    limit: Annotated[int, typer.Option(min=1, max=500, help="How many messages.")] = 50,
    before: Annotated[int | None, typer.Option(min=1, help="Those before this sequence.")] = None,
    after: Annotated[int | None, typer.Option(min=0, help="Those after this sequence.")] = None,
    user: UserOption = None,
    tenant: TenantOption = "default",
) -> None:
    """Print messages, oldest first.

    Examples:

    \b
      holdfast chat history lobby --user alice
      holdfast chat history lobby --user alice --before 100 --limit 20 --json
    """
    if before is not None and after is not None:
        raise InvalidMessage("give --before or --after, not both")
    rest = context.as_user(user, tenant)
    page = rest.get(
        "/v1/chats", _chat_id(rest, chat_name), "messages", limit=limit, before=before, after=after
    )
    if context.as_json:
        output.as_json(page)
        return
    if page["has_older"]:
        output.line(
            f"… more before {page['messages'][0]['sequence']}"
            if page["messages"]
            else "… more before"
        )
    if not page["messages"]:
        output.line("No messages here yet.")
    for message in page["messages"]:
        output.line(f"{message['sequence']:>6}  {output.message_line(message)}")
    if page["has_newer"] and page["messages"]:
        output.line(f"… more after {page['messages'][-1]['sequence']}")


@chat.command()
@remote_command
def inspect(
    context: CliContext,
    chat_id: Annotated[str, typer.Argument(metavar="CHAT", help="A chat's id.")],
) -> None:
    """Show a chat's numbering: counter, head, count, gaps, epoch, halt. For operators.

    Example:

    \b
      holdfast chat inspect chat_01J9ZK…
    """
    found = context.as_operator().get("/admin/chats", chat_id_of(chat_id))
    about = found["chat"]
    counter = found["counter"]
    output.report_object(
        context,
        found,
        {
            "chat": about["chat_id"],
            "name": about["name"] or "(none)",
            "tenant": about["tenant"],
            "counter": "MISSING: run `holdfast chat recover`" if counter is None else counter,
            "highest": found["highest"],
            "messages": found["count"],
            "gaps": _ranges(found["gaps"]),
            "recorded gaps": _ranges(found["recorded_gaps"]),
            "epoch": about["epoch"],
            "halted": about["halted"] or "no",
        },
    )


@chat.command()
@remote_command
def halt(
    context: CliContext,
    chat_id: Annotated[str, typer.Argument(metavar="CHAT")],
    reason: ReasonOption,
) -> None:
    """Refuse every send to a chat until it is recovered. For operators.

    Example:

    \b
      holdfast chat halt chat_01J9ZK… --reason "duplicate sequence seen"
    """
    changed = context.as_operator().post(
        "/admin/chats", chat_id_of(chat_id), "halt", body={"reason": reason}
    )
    output.report(
        context, changed, f"{chat_id} is halted: sends are refused until `holdfast chat recover`"
    )


@chat.command("raise-epochs")
@remote_command
def raise_epochs(
    context: CliContext,
    reason: ReasonOption,
    sure: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Let every client of a cluster drop its copies and read its chats again: after its
    PostgreSQL was restored in place. For operators.

    A failover, a promotion and a restore to another server are noticed without it.

    Example:

    \b
      holdfast chat raise-epochs --reason "restored the dump of 03:00"
    """
    if not sure:
        typer.confirm("Let every client read all of its chats again?", abort=True, err=True)
    raised = context.as_operator().post("/admin/raise-epochs", body={"reason": reason})
    output.report(context, raised, f"every epoch is above {raised['epoch_base']:,} now")


@chat.command()
@remote_command
def recover(
    context: CliContext,
    chat_id: Annotated[str, typer.Argument(metavar="CHAT")],
    reason: ReasonOption,
) -> None:
    """Repair a chat's numbering and let it go on; its clients read it again, from the
    beginning. For operators.

    Example:

    \b
      holdfast chat recover chat_01J9ZK… --reason "counter was missing"
    """
    changed = context.as_operator().post(
        "/admin/chats", chat_id_of(chat_id), "recover", body={"reason": reason}
    )
    output.report(
        context,
        changed,
        f"{chat_id} goes on in epoch {changed['chat']['epoch']} at {changed['chat']['head']}",
    )


def _ranges(gaps: list[list[int]]) -> str:
    return (
        ", ".join(f"{first}–{last}" if first != last else f"{first}" for first, last in gaps)
        or "none"
    )


def _list_hot(context: CliContext) -> None:
    status = context.as_operator().get("/admin/status")
    busiest = _busiest(status["hot_chats"])
    found = [{"chat_id": chat_id, "messages_per_minute": count} for chat_id, count in busiest]
    empty = (
        f"No chat had more than {status['hot_messages_per_minute']} messages in the last minute."
    )
    output.report_rows(
        context, found, ("chat", "messages in the last minute"), busiest, empty=empty
    )


def _list_halted(context: CliContext) -> None:
    found = context.as_operator().get("/admin/halted", limit=500)
    rows = ((chat["chat_id"], chat["tenant"], chat["why"]) for chat in found["chats"])
    output.report_rows(context, found, ("chat", "tenant", "why"), rows, empty="No chat is halted.")


def _unread(entry: Mapping[str, Any]) -> str:
    return f"{entry['unread']}+" if entry["unread_capped"] else str(entry["unread"])


def _busiest(messages: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(messages.items(), key=lambda chat: (-chat[1], chat[0]))


def _all_chats(rest: RestClient) -> list[dict[str, Any]]:
    chats: list[dict[str, Any]] = []
    after: str | None = None
    while True:
        page = rest.get("/v1/chats", limit=200, after=after)
        chats += page["chats"]
        after = page["next"]
        if after is None:
            return chats


def _chat_id(rest: RestClient, name: str) -> str:
    """The id of a chat, given by its id or by its unique title."""
    if name.startswith("chat_"):
        return name
    found = [entry["chat"]["chat_id"] for entry in _all_chats(rest) if entry["title"] == name]
    if not found:
        raise NotFound(f"you have no chat titled {name!r}: see `holdfast chat ls`")
    if len(found) > 1:
        raise InvalidMessage(
            f"{len(found)} of your chats are titled {name!r}: use an id, {' or '.join(found)}"
        )
    return str(found[0])


def _send(rest: RestClient, path: tuple[str, ...], body: dict[str, str], key: str) -> Any:
    """Send, and retry under the same key while the error is retryable."""
    for attempt in range(1, SEND_TRIES + 1):
        try:
            return rest.post(*path, body=body, key=key)
        except HoldfastError as error:
            if not error.retryable or attempt == SEND_TRIES:
                raise
            time.sleep(error.retry_after_seconds or 0.5 * attempt)
    raise AssertionError("unreachable")
