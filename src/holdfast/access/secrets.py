"""The secrets of a server: made on the first start, mode 0600, never logged.

``secrets.json`` holds the token secret and the first admin key: a user who can read the
state directory can mint tokens and operate the server. ``keys.json`` holds only hashes.

Several nodes have the same credentials if each reads the same two files, or copies of
them, from a directory that it never writes (``SharedCredentials``). One of them may
have that directory as its state directory: then keys are changed there.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from holdfast.access.contract import ApiKey, Credentials, decode_keys, encode_keys
from holdfast.access.keys import digest_of, new_key, with_every_scope
from holdfast.access.secret_file import read_token_keys
from holdfast.drivers.files import replace_file
from holdfast.errors import Forbidden, StateCorrupted, StateDirectory, VersionConflict

SECRETS_FILE = "secrets.json"
KEYS_FILE = "keys.json"
FIRST_KEY_LABEL = "made at the first start"


class Secrets(Struct, frozen=True):
    """The contents of ``secrets.json``."""

    jwt_secret: str
    """"" in a cluster, whose token keys are in ``access.tokens.secret_file``."""
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
            " directory with --state-dir or HOLDFAST_STATE_DIR. In a cluster only the node that"
            " started first has one: give a key with --token-file"
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


def open_secrets(state_dir: Path, at: str) -> Secrets:
    """The secrets of a starting server.

    If there are none, makes them and revokes the admin key of earlier ones. The admin
    key always gets every scope, also scopes newer than the key: a key can only grant
    its own scopes, so no other key could grant those.
    """
    keys, keys_file = read_keys(state_dir / KEYS_FILE), state_dir / KEYS_FILE
    path = state_dir / SECRETS_FILE
    if path.exists():
        if path.stat().st_mode & 0o077:
            raise StateDirectory(
                f"{path} can be read by others: `chmod 600` it, or remove it to get new secrets;"
                " the old are void then"
            )
        completed = with_own_key_completed(state_dir, keys)
        if completed != keys:
            write_keys(keys_file, completed)
        return read_secrets(state_dir)
    others = [key for key in keys if (key.kind, key.label) != ("admin", FIRST_KEY_LABEL)]
    key, admin_key = new_key("admin", FIRST_KEY_LABEL, at)
    write_keys(keys_file, [*others, key])  # removing the file is meant to void its key
    made = Secrets(secrets.token_urlsafe(48), admin_key)
    _write(path, made)
    return made


def make_cluster_key(state_dir: Path, at: str) -> ApiKey:
    """The admin key that a cluster begins with; ``secrets.json`` gets its secret."""
    key, admin_key = new_key("admin", FIRST_KEY_LABEL, at)
    _write(state_dir / SECRETS_FILE, Secrets("", admin_key))
    return key


def with_own_key_completed(state_dir: Path, keys: Sequence[ApiKey]) -> Sequence[ApiKey]:
    """The keys, with every scope for the admin key of this directory, if it has one."""
    if not (state_dir / SECRETS_FILE).exists():
        return keys
    own = digest_of(read_secrets(state_dir).admin_key)
    return [with_every_scope(key) if key.digest == own else key for key in keys]


def keep_admin_key(state_dir: Path, keys: Sequence[ApiKey], admin_key: str) -> None:
    """Make this key the state directory's own, unless its present one is among
    ``keys``.

    The token secret stays. A node of a cluster may have had no key.
    """
    path = state_dir / SECRETS_FILE
    found = read_secrets(state_dir) if path.exists() else Secrets("", "")
    if digest_of(found.admin_key) not in {key.digest for key in keys}:
        _write(path, replace(found, admin_key=admin_key))


class FileCredentials:
    """Credentials in the two files of a state directory, which one process holds.

    ``secret_file`` has the token keys instead, if given. The version is a digest of the
    key file, so a file put back by hand counts as a change.
    """

    read_only = ""
    follow_seconds = None

    def __init__(self, state_dir: Path, secret_file: Path | None = None) -> None:
        self._state_dir = state_dir
        self._secret_file = secret_file
        self._keys_file = state_dir / KEYS_FILE

    async def load(self) -> Credentials:
        return await asyncio.to_thread(self._load)

    async def save(self, keys: Sequence[ApiKey], version: str) -> str:
        return await asyncio.to_thread(self._save, keys, version)

    def _load(self) -> Credentials:
        data = _read(self._keys_file)
        token_keys: Sequence[bytes] = [read_secrets(self._state_dir).jwt_secret.encode()]
        if self._secret_file is not None:
            token_keys = read_token_keys(self._secret_file)
        return Credentials(token_keys, _decode(self._keys_file, data), _version(data))

    def _save(self, keys: Sequence[ApiKey], version: str) -> str:
        if _version(_read(self._keys_file)) != version:
            raise VersionConflict("the keys were changed meanwhile")
        return _version(write_keys(self._keys_file, keys))


class SharedCredentials:
    """Credentials in the two files of a directory that this node only reads.

    A file that is missing is an error here, never an empty key ring: it may be about to
    be replaced.
    """

    follow_seconds = 2.0

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.read_only = (
            f"this node only reads its keys, from {folder} (access.credentials_dir): change them"
            " on the server whose state directory that is, or where the files come from"
        )

    async def load(self) -> Credentials:
        return await asyncio.to_thread(self._load)

    async def save(self, keys: Sequence[ApiKey], version: str) -> str:
        raise Forbidden(self.read_only)

    def _load(self) -> Credentials:
        keys_file, secrets_file = self._folder / KEYS_FILE, self._folder / SECRETS_FILE
        data = _read(keys_file)
        if data is None or not secrets_file.exists():
            raise StateDirectory(
                f"{self._folder} (access.credentials_dir) must have {SECRETS_FILE} and"
                f" {KEYS_FILE}: copy both from the state directory of a server"
            )
        if secrets_file.stat().st_mode & 0o007:
            raise StateDirectory(f"{secrets_file} can be read by everybody: `chmod o=` it")
        token_key = read_secrets(self._folder).jwt_secret.encode()
        return Credentials([token_key], _decode(keys_file, data), _version(data))


def read_keys(path: Path) -> Sequence[ApiKey]:
    """The keys of a key file; none if there is no file."""
    return _decode(path, _read(path))


def write_keys(path: Path, keys: Sequence[ApiKey]) -> bytes:
    """Replace a key file; returns its new content."""
    data = msgspec.json.format(encode_keys(keys), indent=2)
    write_private(path, data)
    return data


def write_private(path: Path, data: bytes) -> None:
    """``replace_file``; StateDirectory if it fails."""
    try:
        replace_file(path, data)
    except OSError as error:
        raise StateDirectory(
            f"{path} cannot be written: {error.strerror}; make room or give write access"
        ) from error


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateDirectory(
            f"{path} cannot be read: {error.strerror}; run as the user who owns it"
        ) from error


def _decode(path: Path, data: bytes | None) -> list[ApiKey]:
    if data is None:
        return []
    try:
        return decode_keys(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StateCorrupted(
            f"{path} is not a key file ({error}): restore it, or remove it and issue new keys"
        ) from error


def _version(data: bytes | None) -> str:
    return "" if data is None else hashlib.blake2b(data, digest_size=16).hexdigest()


def _write(path: Path, made: Secrets) -> None:
    write_private(path, msgspec.json.format(msgspec.json.encode(made)))
