"""What all commands share: their options, their groups, their error output.

Imports that only some commands need are inside functions, so that help and completion
stay fast.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import msgspec
import typer
from typer.core import TyperGroup

from holdfast.cli.rest import RestClient
from holdfast.clock import SystemClock
from holdfast.drivers.files import default_state_dir, state_dir_in
from holdfast.errors import HoldfastError, InvalidMessage, Unauthorized
from holdfast.message import User, check_id, check_tenant

if TYPE_CHECKING:
    from holdfast.access.secrets import Secrets
    from holdfast.access.tokens import TokenSettings
    from holdfast.settings import Settings

SERVER = "The server and you"

Url = Annotated[
    str | None,
    typer.Option(
        "--url", envvar="HOLDFAST_URL", rich_help_panel=SERVER, help="The server's address."
    ),
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir", envvar="HOLDFAST_STATE_DIR", rich_help_panel=SERVER,
        help="The server's state directory, where its secrets are.",
    ),
]  # fmt: skip
Credential = Annotated[
    str | None,
    typer.Option(
        "--token", envvar="HOLDFAST_TOKEN", rich_help_panel=SERVER, show_envvar=True,
        help="A user token or API key, instead of one from the state directory. Others see it in"
        " the list of processes: use the variable or --token-file.",
    ),
]  # fmt: skip
CredentialFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file", envvar="HOLDFAST_TOKEN_FILE", rich_help_panel=SERVER, show_envvar=True,
        help="A file with the user token or API key.",
    ),
]  # fmt: skip
Config = Annotated[
    Path | None,
    typer.Option(
        "-c", "--config", envvar="HOLDFAST_CONFIG", rich_help_panel=SERVER, help="A settings file."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", rich_help_panel=SERVER, help="Print JSON.")]

UserOption = Annotated[str | None, typer.Option("--user", "-u", help="Act as this user.")]
TenantOption = Annotated[str, typer.Option("--tenant", help="The user's tenant.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why; it goes into the audit log.")]
TOKEN_HOURS = 24
"""The default lifetime of a token that a command makes."""
ASKED = "asked for on the command line"
_BANNED_HINT = " (an operator lifts it with `holdfast unban`)"
_TOKEN_HINT = " (make a token with `holdfast token --user NAME`)"
_KEY_HINT = (
    " (if no admin key works any more: stop the server, then `holdfast key create admin --label"
    " LABEL` there, without --url and --token and their variables)"
)


@dataclass(frozen=True, slots=True)
class CliContext:
    """The shared options of one call."""

    url: str | None = None
    state_dir: Path | None = None
    token: str | None = None
    config: Path | None = None
    as_json: bool = False
    token_file: Path | None = None

    def with_credential(self) -> CliContext:
        """With the token from its file; InvalidMessage if invalid or given twice."""
        if self.token_file is None:
            return self
        if self.token:
            raise InvalidMessage(
                "give --token or --token-file (HOLDFAST_TOKEN or HOLDFAST_TOKEN_FILE), not both"
            )
        try:
            with self.token_file.expanduser().open() as file:
                token = file.read(CREDENTIAL_BYTES_MAX).strip()
        except OSError as error:
            raise InvalidMessage(f"{self.token_file} cannot be read: {error.strerror}") from error
        if not token or any(c.isspace() for c in token):
            raise InvalidMessage(
                f"{self.token_file} holds no token: one line is expected, with nothing else in it"
            )
        return replace(self, token=token, token_file=None)

    @property
    def address(self) -> str:
        """--url, else the address in the settings, else the default."""
        if self.url:
            return self.url
        if self._configures("SERVER"):
            return settings_of(self.config).server.url
        host, port = (
            os.environ.get("HOLDFAST_HOST", "127.0.0.1"),
            os.environ.get("HOLDFAST_PORT", "8080"),
        )
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def state_path(self) -> Path:
        if self.state_dir is not None:
            return state_dir_in(self.state_dir.expanduser())
        return (
            settings_of(self.config).server.state_path
            if self._configures("SERVER")
            else state_dir_in(default_state_dir())
        )

    @property
    def names_a_server(self) -> bool:
        """Whether an option or a variable names a server or a credential."""
        return bool(self.url or self.token)

    @property
    def stopped_state(self) -> Path | None:
        """A stopped server's state directory; None if it runs or does not exist."""
        from holdfast.access.secrets import SECRETS_FILE
        from holdfast.node.state_dir import holder

        is_there = (self.state_path / SECRETS_FILE).exists() or self.cluster is not None
        return self.state_path if is_there and not holder(self.state_path) else None

    @property
    def cluster(self) -> Settings | None:
        """The settings, if they are those of a node of a cluster."""
        settings = settings_of(self.config) if self._configures("CLUSTER") else None
        return settings if settings is not None and settings.cluster.postgres else None

    def mint(
        self,
        user: str,
        tenant: str,
        hours: float,
        scopes: Collection[str] = (),
        chats: Collection[str] = (),
    ) -> str:
        """A token for ``user``, signed with the server's own secret.

        It has all scopes and all chats unless some are named.
        """
        from holdfast.access.principal import USER_SCOPES
        from holdfast.access.tokens import Tokens, shared_secret

        if problem := check_id(user, "user") or check_tenant(tenant):
            raise InvalidMessage(problem)
        settings = self._token_settings()
        tokens = Tokens(settings, shared_secret(self._token_key(settings)), SystemClock())
        return tokens.mint(User(tenant, user), hours * 3600, scopes or USER_SCOPES, chats or None)

    def user_token(self, user: str | None, tenant: str) -> str:
        """The given token, or a new one for the given user."""
        if self.token:
            from holdfast.client.connection import claims_of

            subject = claims_of(self.token).sub
            if user and user != subject:
                raise InvalidMessage(
                    f"the token speaks for {subject or 'no user'}, not for {user}: give one of"
                    " the two"
                )
            return self.token
        if not user:
            raise InvalidMessage(
                "say who you are: --user alice (uses the state directory's secret) or --token-file"
                " FILE"
            )
        return self.mint(user, tenant, TOKEN_HOURS)

    def as_user(self, user: str | None, tenant: str) -> RestClient:
        return RestClient(self.address, self.user_token(user, tenant))

    def as_operator(self, timeout_seconds: float = 30.0) -> RestClient:
        return RestClient(self.address, self.token or self._secrets().admin_key, timeout_seconds)

    def _token_settings(self) -> TokenSettings:
        """The server's token settings; the defaults if none are configured."""
        from holdfast.access.tokens import TokenSettings

        return (
            settings_of(self.config).access.tokens
            if self._configures("ACCESS")
            else TokenSettings()
        )

    def _token_key(self, settings: TokenSettings) -> bytes:
        from holdfast.access.secret_file import read_token_keys

        if settings.secret_file:
            return read_token_keys(Path(settings.secret_file).expanduser())[0]
        if not (secret := self._secrets().jwt_secret):
            raise InvalidMessage(
                "the token keys of a cluster are in access.tokens.secret_file: name the settings"
                " of the server with --config"
            )
        return secret.encode()

    def _configures(self, group: str) -> bool:
        """Whether anything may configure ``group``: loading all settings is slow."""
        return self.config is not None or any(
            name.startswith(f"HOLDFAST_{group}__") for name in os.environ
        )

    def _secrets(self) -> Secrets:
        from holdfast.access.secrets import read_secrets

        shared = (
            settings_of(self.config).access.credentials_dir if self._configures("ACCESS") else ""
        )
        return read_secrets(Path(shared).expanduser() if shared else self.state_path)


def settings_of(file: Path | None, overrides: Mapping[str, object] | None = None) -> Settings:
    """The settings of a server with this file; BadSetting if invalid."""
    from holdfast.settings import load

    environ = {name: value for name, value in os.environ.items() if name != "HOLDFAST_CONFIG"}
    return load(file, environ, overrides or {})


_SHARED: dict[str, tuple[Any, Any]] = {
    "url": (Url, None),
    "token": (Credential, None),
    "token_file": (CredentialFile, None),
    "state_dir": (StateDir, None),
    "config": (Config, None),
    "as_json": (AsJson, False),
}
_REMOTE = ("url", "token", "token_file")
CREDENTIAL_BYTES_MAX = 64 * 1024
_ALIASES = {"list": "ls"}
"""Accepted spelling -> the command's name, which alone is in help and documentation."""


def remote_command(function: Callable[..., None]) -> Callable[..., None]:
    """Add the shared options, passed as the first parameter, and print errors."""
    return _with_options(function, _SHARED)


def local_command(function: Callable[..., None]) -> Callable[..., None]:
    """As ``remote_command``, for a command that contacts no server."""
    return _with_options(
        function, {name: option for name, option in _SHARED.items() if name not in _REMOTE}
    )


def _with_options(
    function: Callable[..., None], shared: Mapping[str, tuple[Any, Any]]
) -> Callable[..., None]:
    @functools.wraps(function)
    def command(ctx: typer.Context, **given: Any) -> None:
        outer = ctx.obj if isinstance(ctx.obj, CliContext) else CliContext()
        own = {name: given.pop(name) for name in shared}
        context = replace(outer, **{name: value for name, value in own.items() if value})
        with reporting_errors(context.as_json):
            function(context.with_credential(), **given)

    own = list(inspect.signature(function).parameters.values())[1:]
    hints = get_type_hints(function, include_extras=True)
    typer_context = inspect.Parameter(
        "ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in shared.items()
    ]
    parameters = [
        typer_context,
        *(p.replace(annotation=hints[p.name], kind=p.KEYWORD_ONLY) for p in own),
        *added,
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    del command.__wrapped__
    return command


def chat_id_of(name: str) -> str:
    """A chat's id, as an operator gives it: only members can look up a title."""
    if not name.startswith("chat_"):
        raise InvalidMessage(
            f"{name!r} is not a chat id: an operator names a chat by its id (chat_…),"
            " which `holdfast chat ls --user MEMBER` shows"
        )
    return name


class _Group(TyperGroup):
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or super().get_command(
            ctx, _ALIASES.get(cmd_name, cmd_name)
        )


def group(about: str) -> typer.Typer:
    """A group of commands, such as ``holdfast chat``."""
    return typer.Typer(cls=_Group, no_args_is_help=True, help=about, rich_markup_mode=None)


@contextmanager
def reporting_errors(as_json: bool) -> Iterator[None]:
    """Turn our errors into a sentence on stderr and exit code 1."""
    try:
        yield
    except Unauthorized as error:
        fail(as_json, error, _credential_hint(error))
    except HoldfastError as error:
        fail(as_json, error)
    except UnicodeError:
        fail(as_json, InvalidMessage("what was given is not UTF-8 text; nothing was sent"))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        # The reader of our output has left. Without this, Python reports it again on
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None


def _credential_hint(error: Unauthorized) -> str:
    """What to do about a refused credential, depending on the reason."""
    if error.details.get("revoked") == "ban":
        return _BANNED_HINT
    if "API key is not known" in error.message:
        return _KEY_HINT
    return _TOKEN_HINT if "token" in error.message else ""


def fail(as_json: bool, error: HoldfastError, hint: str = "") -> NoReturn:
    message = f"{error.message or error.code}{hint}"
    if as_json:
        body = {"error": {"code": error.code, "message": message, "retryable": error.retryable}}
        typer.echo(msgspec.json.encode(body).decode(), err=True)
    else:
        typer.echo(f"Error: {message}", err=True)
        if error.retry_after_seconds:
            typer.echo(f"Try again in {error.retry_after_seconds:g} s.", err=True)
    raise typer.Exit(1)
