"""Token keys in a file of their own (``access.tokens.secret_file``), one on each line.

The first line signs, all lines verify. So keys are replaced without voiding a token:
add the new key as the second line on every node, then move it to the first, and remove
the old one when its last token has expired. The file is read when a node starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from holdfast.access.tokens import SECRET_BYTES_MIN
from holdfast.errors import BadSetting

TOKEN_KEYS_MAX = 8
"""A token that no key signed is tried with all of them."""
FILE_BYTES_MAX = 64 * 1024
_MAKE_ONE = "`openssl rand -base64 48` makes a key"


def read_token_keys(path: Path) -> Sequence[bytes]:
    """The keys of the file. BadSetting says what is wrong, and shows none of them."""
    try:
        mode = path.stat().st_mode
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise _bad(path, f"cannot be read: {error.strerror}") from None
    if mode & 0o007:
        raise _bad(path, "can be read by everybody: `chmod o=` it")
    keys = [key for line in data.splitlines() if (key := line.strip())]
    short = [number for number, key in enumerate(keys, 1) if len(key) < SECRET_BYTES_MIN]
    if not keys:
        raise _bad(path, f"has no key in it; {_MAKE_ONE}")
    if short:
        raise _bad(path, f"needs {SECRET_BYTES_MIN} bytes or more in key {short[0]}; {_MAKE_ONE}")
    if len(data) > FILE_BYTES_MAX or len(keys) > TOKEN_KEYS_MAX:
        raise _bad(
            path, f"may have {TOKEN_KEYS_MAX} keys and {FILE_BYTES_MAX} bytes: remove the oldest"
        )
    return keys


def check_one_source(credentials_dir: str, secret_file: str) -> None:
    """ValueError if both settings say where the token keys are."""
    if credentials_dir and secret_file:
        raise ValueError(
            "access.credentials_dir and access.tokens.secret_file both say where token keys are:"
            " keep credentials_dir if this node shall read its API keys from there, too, else"
            " keep secret_file"
        )


def _bad(path: Path, why: str) -> BadSetting:
    return BadSetting(f"access.tokens.secret_file: {path} {why}")
