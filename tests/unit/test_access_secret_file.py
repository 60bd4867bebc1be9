"""Token keys in a file: the first line signs, all verify; a bad file stops the start."""

from __future__ import annotations

from pathlib import Path

import jwt
import pytest

from holdfast.access.proofs import CursorProofs
from holdfast.access.secret_file import TOKEN_KEYS_MAX, read_token_keys
from holdfast.access.tokens import Tokens, TokenSettings, shared_secret
from holdfast.cli.context import CliContext
from holdfast.clock import ManualClock, SystemClock
from holdfast.errors import BadSetting, Unauthorized
from holdfast.message import Cursor, User
from holdfast.node.engines import open_engines
from holdfast.settings import load

NEW, OLD = b"n" * 32, b"o" * 48
ALICE = User("acme", "alice")


def secret_file(folder: Path, data: bytes, mode: int = 0o600) -> Path:
    file = folder / "token-keys"
    file.write_bytes(data)
    file.chmod(mode)
    return file


@pytest.mark.parametrize("data", [NEW + b"\n" + OLD, b"\n " + NEW + b"\r\n\n" + OLD + b"\n\n"])
@pytest.mark.parametrize("mode", [0o600, 0o440])
def test_each_line_of_the_file_is_a_key(data: bytes, mode: int, tmp_path: Path) -> None:
    assert read_token_keys(secret_file(tmp_path, data, mode)) == [NEW, OLD]


@pytest.mark.parametrize(
    ("data", "mode", "said"),
    [
        (b"\n  \n", 0o600, "has no key in it"),
        (NEW + b"\nhunter2", 0o600, "32 bytes or more in key 2"),
        (NEW, 0o604, "can be read by everybody: `chmod o=` it"),
        (b"\n".join([NEW] * (TOKEN_KEYS_MAX + 1)), 0o600, "may have 8 keys"),
        (b"k" * 70_000, 0o600, "65536 bytes"),
    ],
)
def test_bad_secret_file_is_refused_without_showing_it(
    data: bytes, mode: int, said: str, tmp_path: Path
) -> None:
    file = secret_file(tmp_path, data, mode)
    with pytest.raises(BadSetting, match=r"access\.tokens\.secret_file: .*token-keys") as refused:
        read_token_keys(file)
    assert said in refused.value.message and "hunter2" not in refused.value.message


def test_missing_secret_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match=r"secret_file: .*gone cannot be read: No such file"):
        read_token_keys(tmp_path / "gone")


def test_first_secret_signs_and_all_verify() -> None:
    clock = ManualClock(1_700_000_000)

    def tokens(*secrets: bytes) -> Tokens:
        return Tokens(TokenSettings(), shared_secret(*secrets), clock)

    both, old, new = tokens(NEW, OLD), tokens(OLD), tokens(NEW)
    assert both.verify(old.mint(ALICE, 60)).user == ALICE
    assert both.signed_claims(old.sign({"a": 1})) == {"a": 1}
    assert new.verify(both.mint(ALICE, 60)).user == ALICE
    for refuses, of in ((old, both), (both, tokens(b"x" * 32))):
        with pytest.raises(Unauthorized):
            refuses.verify(of.mint(ALICE, 60))
        with pytest.raises(Unauthorized):
            refuses.signed_claims(of.sign({"a": 1}))


def test_proof_made_with_an_older_secret_still_proves_its_cursor() -> None:
    cursor, other = Cursor(1, 7), Cursor(1, 8)
    both, old, new = CursorProofs(NEW, OLD), CursorProofs(OLD), CursorProofs(NEW)
    made = old.of("acme", "chat_1", cursor)
    assert both.proves(made, "acme", "chat_1", cursor)
    assert not both.proves(made, "acme", "chat_1", other)
    assert both.of("acme", "chat_1", cursor) == new.of("acme", "chat_1", cursor)
    assert not new.proves(made, "acme", "chat_1", cursor)


@pytest.mark.real_time
async def test_node_has_its_token_keys_from_the_file_and_its_own_api_keys(tmp_path: Path) -> None:
    file = secret_file(tmp_path, NEW + b"\n" + OLD)
    settings = load(None, {}, {"access.tokens.secret_file": str(file)})
    async with open_engines(settings, tmp_path, SystemClock()) as engines:
        loaded = await engines.credentials.load()
    assert list(loaded.token_keys) == [NEW, OLD]
    assert [key.kind for key in loaded.keys] == ["admin"] and (tmp_path / "secrets.json").exists()


def test_command_line_signs_with_the_first_line(tmp_path: Path) -> None:
    config = tmp_path / "holdfast.toml"
    file = secret_file(tmp_path, NEW + b"\n" + OLD)
    config.write_text(f'[access.tokens]\nsecret_file = "{file}"\n')
    token = CliContext(state_dir=tmp_path / "none", config=config).mint("alice", "acme", 1)
    assert jwt.decode(token, NEW, ["HS256"], audience="holdfast")["sub"] == "alice"


def test_secret_file_and_credentials_dir_together_are_refused() -> None:
    both = {"access.tokens.secret_file": "/keys", "access.credentials_dir": "/credentials"}
    with pytest.raises(BadSetting, match=r"keep credentials_dir if .* else keep secret_file"):
        load(None, {}, both)
