"""The secrets of a state directory: made on the first start, mode 0600, never logged.

``secrets.json`` holds the token secret and the first admin key: a user who can read the
state directory can mint tokens and operate the server. ``keys.json`` holds only hashes.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.access.keys import KeyRing, load_keys, write_private
from holdfast.errors import StateCorrupted, StateDirectory, Unauthorized

SECRETS_FILE = "secrets.json"
KEYS_FILE = "keys.json"
FIRST_KEY_LABEL = "made at the first start"


class Secrets(Struct, frozen=True):
    """The contents of ``secrets.json``."""

    jwt_secret: str
    admin_key: str

    def __repr__(self) -> str:
        return "Secrets(…)"


def read_secrets(state_dir: Path) -> Secrets:
    """The secrets of a state directory.

    StateDirectory says what to do if unreadable.
    """
    path = state_dir / SECRETS_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Secrets)
    except FileNotFoundError:
        raise StateDirectory(
            f"there is no {path}: start the server once with `holdfast serve`, or name its state"
            " directory with --state-dir or HOLDFAST_STATE_DIR"
        ) from None
    except PermissionError:
        raise StateDirectory(f"{path} may be read only by the user who runs the server") from None
    except OSError as error:
        raise StateDirectory(
            f"{path} cannot be read: {error.strerror}; check its disk, owner and mode"
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StateCorrupted(
            f"{path} is not a file of secrets ({error}): put a copy of it back, or remove it: then"
            " new ones are made, and every token made so far is void"
        ) from None


def open_secrets(state_dir: Path, at: str) -> tuple[Secrets, KeyRing]:
    """The secrets and keys of a starting server.

    If there are no secrets, makes them and revokes the admin key of earlier ones. The
    admin key always gets every scope, also scopes newer than the key: a key can only
    grant its own scopes, so no other key could grant those.
    """
    ring = load_keys(state_dir / KEYS_FILE)
    path = state_dir / SECRETS_FILE
    if path.exists():
        if path.stat().st_mode & 0o077:
            raise StateDirectory(
                f"{path} can be read by others: `chmod 600` it, or remove it to get new secrets;"
                " the old are void then"
            )
        kept = read_secrets(state_dir)
        ring.complete(kept.admin_key)
        return kept, ring
    for key in ring.list():
        if key.kind == "admin" and key.label == FIRST_KEY_LABEL:
            ring.revoke(key.key_id, force=True)  # removing the file is meant to void its key
    _, admin_key = ring.issue("admin", FIRST_KEY_LABEL, at)
    made = Secrets(secrets.token_urlsafe(48), admin_key)
    _write(path, made)
    return made, ring


def keep_admin_key(state_dir: Path, ring: KeyRing, admin_key: str) -> None:
    """Make this key the state directory's own, unless its present one is still in
    force.

    The token secret stays.
    """
    kept = read_secrets(state_dir)
    try:
        ring.find(kept.admin_key)
    except Unauthorized:
        _write(state_dir / SECRETS_FILE, replace(kept, admin_key=admin_key))


def _write(path: Path, made: Secrets) -> None:
    write_private(path, msgspec.json.format(msgspec.json.encode(made)))
