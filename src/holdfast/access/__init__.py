"""Who is asking, and what they may do: principals, tokens and keys, the role table, the door.

Values and decisions only; nothing here knows HTTP. The tenant of a principal comes from its credential and
from nowhere else.

- ``principal``  who is asking: a user, a tenant's backend, an operator; and their scopes
- ``roles``      the one table that says what a role may do in a chat
- ``tokens``     user tokens (JWT): mint and verify
- ``compact``    a token as it is written, read once
- ``keys``       API keys: issue, find, revoke; hashed at rest
- ``secrets``    what a state directory keeps for itself
- ``door``       origins, client addresses, handshake and connection limits
"""

from holdfast.access.door import (
    Buckets,
    ConnectionCounts,
    ConnectionLimits,
    HandshakeLimiter,
    HttpCounts,
    HttpLimits,
    address_group,
    client_ip,
    origin_allowed,
)
from holdfast.access.keys import ApiKey, KeyKind, KeyRing, is_api_key, load_keys, save_keys
from holdfast.access.principal import (
    ADMIN_SCOPES,
    TENANT_SCOPES,
    USER_SCOPES,
    Kind,
    Principal,
    Scope,
    bearer,
    require_scope,
)
from holdfast.access.roles import Action, may
from holdfast.access.secrets import Secrets, open_secrets, read_secrets
from holdfast.access.tokens import TokenKey, Tokens, TokenSettings, shared_secret

__all__ = [
    "ADMIN_SCOPES",
    "TENANT_SCOPES",
    "USER_SCOPES",
    "Action",
    "ApiKey",
    "Buckets",
    "ConnectionCounts",
    "ConnectionLimits",
    "HandshakeLimiter",
    "HttpCounts",
    "HttpLimits",
    "KeyKind",
    "KeyRing",
    "Kind",
    "Principal",
    "Scope",
    "Secrets",
    "TokenKey",
    "TokenSettings",
    "Tokens",
    "address_group",
    "bearer",
    "client_ip",
    "is_api_key",
    "load_keys",
    "may",
    "open_secrets",
    "origin_allowed",
    "read_secrets",
    "require_scope",
    "save_keys",
    "shared_secret",
]
