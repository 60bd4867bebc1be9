"""An error frame as the exception the application gets. (Pure.)"""

from __future__ import annotations

from holdfast.errors import (
    Forbidden,
    HoldfastError,
    InternalError,
    InvalidContentType,
    InvalidMessage,
    KeyReused,
    MessageTooLarge,
    NotAMember,
    NotFound,
    Unauthorized,
)
from holdfast.wire.frames import Error

_BY_CODE: dict[str, type[HoldfastError]] = {
    kind.code: kind
    for kind in (
        Forbidden,
        InvalidContentType,
        InvalidMessage,
        KeyReused,
        MessageTooLarge,
        NotAMember,
        NotFound,
        Unauthorized,
    )
}


def refusal(error: Error) -> HoldfastError:
    """The error of our tree with this code; a code of a newer server is an InternalError that names it."""
    kind = _BY_CODE.get(error.code)
    details = {str(key): value for key, value in (error.details or {}).items()}
    if kind is None:
        return InternalError(f"{error.code}: {error.message}", **details)
    return kind(error.message, **details)
