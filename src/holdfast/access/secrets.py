"""The secrets of a state directory: made on the first start, mode 0600, never logged.

``secrets.json`` holds the token secret and the first admin key, so that whoever may read the state directory may
mint tokens and operate the server; nobody else. ``keys.json`` beside it holds only hashes.
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
    """What only the operator may know."""

    jwt_secret: str
    admin_key: str

    def __repr__(self) -> str:
        return "Secrets(…)"


def read_secrets(state_dir: Path) -> Secrets:
    """The secrets of a state directory; StateDirectory says what to do if they are not to be had."""
    path = state_dir / SECRETS_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Secrets)
    except FileNotFoundError:
        raise StateDirectory(
            f"there is no {path}: start the server once with `holdfast serve`, or name its state directory "
            "with --state-dir or HOLDFAST_STATE_DIR"
        ) from None
    except PermissionError:
        raise StateDirectory(f"{path} may be read only by the user who runs the server") from None
    except OSError as error:
        raise StateDirectory(f"{path} cannot be read: {error.strerror}; check its disk, owner and mode") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StateCorrupted(
            f"{path} is not a file of secrets ({error}): put a copy of it back, or remove it: then new ones "
            "are made, and every token made so far is void"
        ) from None


def open_secrets(state_dir: Path, at: str) -> tuple[Secrets, KeyRing]:
    """The secrets and keys of a server that starts; made, and the key of earlier ones revoked, if there are none.

    The admin key beside them carries every scope, those too that are newer than the key: a key hands out only what it
    carries, so nobody else could give them to anybody.
    """
    ring = load_keys(state_dir / KEYS_FILE)
    path = state_dir / SECRETS_FILE
    if path.exists():
        if path.stat().st_mode & 0o077:
            raise StateDirectory(
                f"{path} can be read by others: `chmod 600` it, or remove it to get new secrets; the old are void then"
            )
        kept = read_secrets(state_dir)
        ring.complete(kept.admin_key)
        return kept, ring
    for key in ring.list():
        if key.kind == "admin" and key.label == FIRST_KEY_LABEL:
            ring.revoke(key.key_id, force=True)  # whoever removes a file that others have seen means the key in it
    _, admin_key = ring.issue("admin", FIRST_KEY_LABEL, at)
    made = Secrets(secrets.token_urlsafe(48), admin_key)
    _write(path, made)
    return made, ring


def keep_admin_key(state_dir: Path, ring: KeyRing, admin_key: str) -> None:
    """Make this key the state directory's own, unless the one it has is still in force. The token secret stays."""
    kept = read_secrets(state_dir)
    try:
        ring.find(kept.admin_key)
    except Unauthorized:
        _write(state_dir / SECRETS_FILE, replace(kept, admin_key=admin_key))


def _write(path: Path, made: Secrets) -> None:
    write_private(path, msgspec.json.format(msgspec.json.encode(made)))
