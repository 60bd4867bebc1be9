"""The commands of ``holdfast``, in the order in which a new user needs them."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast import __version__
from holdfast.cli.alerts import alerts
from holdfast.cli.audit import audit
from holdfast.cli.chats import chat
from holdfast.cli.conformance import conformance
from holdfast.cli.context import AsJson, CliContext, Config, Credential, StateDir, Url
from holdfast.cli.cutoff import ban, disconnect, mute, revoke, unban, unmute
from holdfast.cli.dead import dead
from holdfast.cli.doctor import doctor
from holdfast.cli.jobs import jobs
from holdfast.cli.operations import backup, erase, key, restore, status, token
from holdfast.cli.replies import ask, replies, usage
from holdfast.cli.rules import rules
from holdfast.cli.serve import serve
from holdfast.cli.verify import verify
from holdfast.cli.webhooks import webhooks

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(print_it: bool) -> None:
    if print_it:
        typer.echo(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    url: Url = None,
    state_dir: StateDir = None,
    token: Credential = None,
    config: Config = None,
    as_json: AsJson = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A chat server that does not lose messages.

    The tour:

    \b
      holdfast serve                                          start a server here
      holdfast chat create --user alice --name lobby -m bob   a chat for two
      holdfast chat open lobby --user alice                   talk, in one terminal
      holdfast chat open lobby --user bob                     and in another
      holdfast ask --user alice "Hello?"                      ask a model
      holdfast status                                         how the server is
      holdfast doctor                                         what to change
      holdfast verify                                         check its promises
      holdfast backup                                         copy it while it runs

    Every command explains itself: holdfast chat open --help
    """
    ctx.obj = CliContext(url, state_dir, token, config, as_json)


app.command()(serve)
app.command()(token)
app.command()(status)
app.command()(doctor)
app.add_typer(chat, name="chat")
app.add_typer(key, name="key")
app.add_typer(alerts, name="alerts")
app.add_typer(audit, name="audit")
app.add_typer(revoke, name="revoke")
app.command()(ban)
app.command()(unban)
app.command()(mute)
app.command()(unmute)
app.command()(disconnect)
app.command()(ask)
app.add_typer(replies, name="replies")
app.command()(usage)
app.add_typer(rules, name="rules")
app.add_typer(jobs, name="jobs")
app.add_typer(dead, name="dead")
app.add_typer(webhooks, name="webhooks")
app.command()(verify)
app.command()(conformance)
app.command()(backup)
app.command()(restore)
app.command()(erase)
