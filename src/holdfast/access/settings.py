"""What an operator sets about access."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.access.connection_limits import ConnectionLimits, HttpLimits
from holdfast.access.issuers import IssuerSettings, check_issuers
from holdfast.access.secret_file import check_one_source
from holdfast.access.tokens import TokenSettings


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Who may come in, and how often."""

    credentials_dir: str = ""
    """Where this node reads ``secrets.json`` and ``keys.json`` from without ever
    changing them, so that several nodes have the same. Changed keys are in force within
    5 s, a changed token secret after a restart. Left empty: they are made and changed
    in the state directory.
    """

    tokens: TokenSettings = field(default_factory=TokenSettings)
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    http: HttpLimits = field(default_factory=HttpLimits)
    issuers: tuple[IssuerSettings, ...] = ()
    """Your own sign-ins whose tokens are taken beside this server's:
    ``[[access.issuers]]`` for each; in a variable a JSON array.
    """

    def __post_init__(self) -> None:
        check_issuers(self.issuers, self.tokens.issuer)
        check_one_source(self.credentials_dir, self.tokens.secret_file)
