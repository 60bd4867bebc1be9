"""Tokens of other issuers: keys accepted, keys kept fresh, the cost of unknown keys."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, rsa
from structlog.testing import capture_logs
from token_issuer import ISSUER, KINDS, jwk, jwks, private_key, signed

from holdfast.access.issuers import (
    FETCH_SECONDS,
    REFETCH_SECONDS,
    Issuers,
    IssuerSettings,
    check_issuers,
)
from holdfast.access.jwks import JWKS_BYTES_MAX, JWKS_KEYS_MAX, BadJwks, read_jwks
from holdfast.access.tokens import Tokens, TokenSettings, shared_secret
from holdfast.errors import BadSetting, Unauthorized, Unavailable
from holdfast.message import User
from holdfast.settings import differences, load
from holdfast.telemetry.metrics import REGISTRY
from proof.virtual_loop import LoopClock

SECRET = b"a secret of at least thirty-two bytes"
URL = "https://sign-in.example/jwks.json"


# --- what a set says
# ----------------------------------------------------------------------------------


def test_each_kind_of_key_gets_the_one_algorithm_that_its_type_allows() -> None:
    bare = [jwk(kind, f"k{kind}", alg=None, use=None) for kind in KINDS]
    keys = read_jwks(jwks(*bare))
    assert {kid: key.algorithm for kid, key in keys.items()} == {f"k{kind}": kind for kind in KINDS}
    (alone,) = read_jwks(jwks(jwk("ES256", kid=None))).items()
    assert alone[0] is None and alone[1].algorithm == "ES256"


def of(key: Any, **fields: Any) -> dict[str, Any]:
    """A key of a kind that is not taken."""
    kind = (
        "RS256"
        if isinstance(key, rsa.RSAPublicKey)
        else "EdDSA"
        if isinstance(key, ed448.Ed448PublicKey)
        else "ES384"
    )
    return {
        **jwt.PyJWS().get_algorithm_by_name(kind).to_jwk(key, as_dict=True),
        "kid": "x",
        **fields,
    }


def private_jwk() -> dict[str, Any]:
    return dict(
        jwt.PyJWS().get_algorithm_by_name("ES256").to_jwk(private_key("ES256"), as_dict=True),
        kid="x",
    )


UNUSABLE: dict[str, Any] = {
    "no object": 7,
    "a kid that is no text": jwk("ES256", kid=7),
    "an empty kid": jwk("ES256", kid=""),
    "a key to encrypt with": jwk("RS256", use="enc"),
    "operations without verify": jwk("ES256", key_ops=["sign"]),
    "operations that are no list": jwk("ES256", key_ops="verify"),
    "another algorithm of its type": jwk("RS256", alg="RS512"),
    "an algorithm of another type": jwk("RS256", alg="HS256"),
    "an algorithm that is no text": jwk("RS256", alg=["RS256"]),
    "a shared secret": {"kty": "oct", "k": "c2VjcmV0", "kid": "x"},
    "a shared secret called RSA": {**jwk("RS256"), "k": "c2VjcmV0"},
    "a private key": private_jwk(),
    "no type": jwk("ES256", kty=None),
    "a type that is a list": jwk("ES256", kty=["EC"]),
    "a curve that is a list": jwk("ES256", crv=["P-256"]),
    "another curve": of(ec.generate_private_key(ec.SECP384R1()).public_key()),
    "Ed448": of(ed448.Ed448PrivateKey.generate().public_key()),
    "RSA of 1024 bits": of(
        rsa.generate_private_key(public_exponent=65537, key_size=1024).public_key()
    ),
    "a modulus without end": jwk("RS256", n="A" * 40_000),
    "an exponent of 65 bits": jwk("RS256", e="AQAAAAAAAAAB"),
    "no modulus": jwk("RS256", n=None),
    "a point that is on no curve": jwk("ES256", x=jwk("ES256")["y"]),
    "garbage for a point": jwk("ES256", x="!!!"),
    "an Ed25519 key cut off": jwk("EdDSA", x="AAAA"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_key_that_cannot_be_used_is_left_out_and_the_others_count(case: str) -> None:
    with pytest.raises(BadJwks, match="no key of it can be used: key 1: ") as caught:
        read_jwks(jwks(UNUSABLE[case]))
    assert caught.value.reason == "no_usable_key" and len(str(caught.value)) < 500
    assert set(read_jwks(jwks(UNUSABLE[case], jwk("EdDSA", "good")))) == {"good"}


def test_a_name_that_two_keys_carry_names_neither() -> None:
    twice = [jwk("ES256", "b"), jwk("EdDSA", "b")]
    assert set(read_jwks(jwks(*twice, jwk("RS256")))) == {"a"}
    assert set(read_jwks(jwks(jwk("ES256", kid=None), jwk("RS256")))) == {"a"}, (
        "nor does none beside others"
    )
    with pytest.raises(BadJwks, match="twice"):
        read_jwks(jwks(*twice))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "invalid"),
        (b"<html>", "invalid"),
        (b"\xff\xfe{}", "invalid"),
        (b"[" * 100_000, "invalid"),
        (b"[]", "invalid"),
        (b"{}", "invalid"),
        (b'{"keys": {}}', "invalid"),
        (b'{"keys": []}', "no_usable_key"),
        (b" " * (JWKS_BYTES_MAX + 1), "too_large"),
        (jwks(*[{}] * (JWKS_KEYS_MAX + 1)), "invalid"),
    ],
)
def test_what_is_no_set_is_refused_by_its_reason(data: bytes, reason: str) -> None:
    with pytest.raises(BadJwks) as caught:
        read_jwks(data)
    assert caught.value.reason == reason


# --- whose tokens are taken
# ---------------------------------------------------------------------------


class Source:
    """Where keys come from: what it serves now, or how it fails; counts fetches."""

    def __init__(self, *keys: dict[str, Any]) -> None:
        self.answer: bytes | BadJwks | None = jwks(*keys)
        self.fetches = 0

    async def __call__(self, address: str) -> bytes:
        self.fetches += 1
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, BadJwks):
            raise self.answer
        assert self.answer is not None
        return self.answer


class World:
    def __init__(self, source: Source, file: Path | None = None, **changes: Any) -> None:
        self.clock = LoopClock()
        settings = IssuerSettings(
            **{"issuer": ISSUER, "jwks": URL, "tenants": ("acme",), **changes}
        )
        self.issuers = Issuers([settings], source, self.clock, file)
        self.tokens = Tokens(
            TokenSettings(), shared_secret(SECRET), self.clock, issuers=self.issuers
        )
        self.source = source

    async def __aenter__(self) -> World:
        self._task = asyncio.create_task(self.issuers.run())
        await self.settle()
        return self

    async def __aexit__(self, *given: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def settle(self, seconds: float = 0.01) -> None:
        await asyncio.sleep(seconds)

    def token(self, kind: str = "ES256", name: str | None = "a", **given: Any) -> str:
        return signed(kind, name, now=self.clock.now(), **given)

    def refusal(self, token: str) -> Unauthorized | Unavailable:
        with pytest.raises((Unauthorized, Unavailable)) as caught:
            self.tokens.verify(token)
        return caught.value


@pytest.mark.parametrize("kind", KINDS)
async def test_a_token_of_a_published_key_is_taken_and_mapped(kind: str) -> None:
    async with World(Source(*[jwk(k, k) for k in KINDS])) as world:
        principal = world.tokens.verify(world.token(kind, kind))
        assert principal.user == User("acme", "alice") and principal.scopes == {
            "chats:read",
            "chats:send",
        }
        own = world.tokens.mint(User("default", "bob"), 60)
        assert world.tokens.verify(own).user == User("default", "bob"), (
            "the server's own tokens go on"
        )


def forged(now: int) -> Mapping[str, str]:
    public: Any = private_key("RS256").public_key()  # type: ignore[union-attr]
    pem = public.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    claims = {"iss": ISSUER, "aud": "holdfast", "sub": "alice", "iat": now, "exp": now + 60}
    theirs: Any = private_key("RS256")

    def by_secret(secret: bytes, **headers: Any) -> str:
        """PyJWT itself refuses to sign with what looks like a public key."""
        signing_input = jwt.encode(claims, b"x" * 32, "HS256", headers).rpartition(".")[0]
        digest = hmac.digest(secret, signing_input.encode(), "sha256")
        return f"{signing_input}.{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"

    return {
        "HS256 with the public key as the secret": by_secret(pem, kid="a"),
        "HS256 with the public key, no kid": by_secret(pem),
        "HS256 with our own secret in their name": by_secret(SECRET),
        "HS256 under a kid that nobody knows": by_secret(SECRET, kid="b"),
        "none": jwt.encode(claims, None, "none", {"kid": "a"}),
        "none under a kid that nobody knows": jwt.encode(claims, None, "none", {"kid": "b"}),
        "their kid, another's key": signed("RS256", "a", key="b", now=now),
        "another algorithm under an RSA key's kid": signed("ES256", "a", now=now),
        "PS256 with the RSA key": jwt.encode(claims, theirs, "PS256", {"kid": "a"}),
        "our issuer with their key": signed("RS256", "a", now=now, iss="holdfast"),
        "an unknown issuer with their key": signed(
            "RS256", "a", now=now, iss="https://other.example"
        ),
        "an issuer in a list": jwt.api_jws.encode(
            json.dumps({**claims, "iss": [ISSUER]}).encode(), theirs, "RS256", {"kid": "a"}
        ),
        "claims that are a list": jwt.api_jws.encode(b"[1]", theirs, "RS256", {"kid": "a"}),
    }


async def test_no_key_of_one_kind_is_used_as_the_other() -> None:
    async with World(Source(jwk("RS256"))) as world:
        await world.settle(REFETCH_SECONDS)
        for case, token in forged(int(world.clock.now())).items():
            assert isinstance(world.refusal(token), Unauthorized), case
        assert world.source.fetches == 1, "none of them was worth a fetch"
        assert world.tokens.verify(world.token("RS256"))


async def test_the_claims_must_be_those_of_the_issuer() -> None:
    async with World(Source(jwk("ES256")), audience="chat", scope_claim="may") as world:
        good = {"aud": "chat"}
        assert world.tokens.verify(world.token(**good, may=["chats:read"])).scopes == {"chats:read"}
        assert world.tokens.verify(world.token(**good, holdfast_scopes=7)).scopes == {
            "chats:read",
            "chats:send",
        }
        for claims, claim in (
            ({"aud": "holdfast"}, "aud"),
            ({**good, "sub": None}, "sub"),
            ({**good, "sub": "a b"}, "sub"),
            ({**good, "exp": 1}, "exp"),
            ({**good, "tenant": "other"}, "tenant"),
            ({**good, "may": ["x"]}, "may"),
            ({**good, "tenant": ["acme"]}, "tenant"),
            ({**good, "chats": "c"}, "chats"),
        ):
            refusal = world.refusal(world.token(**claims))
            assert isinstance(refusal, Unauthorized) and refusal.details["claim"] == claim, claims


async def test_of_several_tenants_the_token_chooses_and_of_none_other() -> None:
    async with World(Source(jwk("ES256")), tenants=("acme", "zeta")) as world:
        assert world.tokens.verify(world.token(tenant="zeta")).tenant == "zeta"
        for tenant in (None, "default", "*", ["zeta"]):
            assert world.refusal(world.token(tenant=tenant)).details["claim"] == "tenant"


async def test_a_token_without_a_kid_is_taken_where_only_one_key_can_be_meant() -> None:
    async with World(Source(jwk("ES256", kid=None))) as world:
        assert world.tokens.verify(world.token("ES256", None)).user_id == "alice"
        assert world.tokens.verify(world.token("ES256", None, key="a"))
    async with World(Source(jwk("ES256"), jwk("EdDSA", "b"))) as world:
        assert "several" in world.refusal(world.token("ES256", None)).message
        assert world.source.fetches == 1


# --- how keys are kept fresh
# --------------------------------------------------------------------------


async def test_an_unknown_kid_is_fetched_once_in_30_seconds_and_then_refused() -> None:
    async with World(Source(jwk("ES256"))) as world:
        await world.settle(REFETCH_SECONDS)
        unknown = [world.token("ES256", f"made up {n}", key="b") for n in range(1000)]
        for token in unknown:
            refusal = world.refusal(token)
            assert isinstance(refusal, Unavailable) and refusal.retry_after_seconds == 1
        await world.settle()
        assert world.source.fetches == 2
        for token in unknown:
            assert isinstance(world.refusal(token), Unauthorized)
        await world.settle(REFETCH_SECONDS / 2)
        assert isinstance(world.refusal(unknown[0]), Unauthorized) and world.source.fetches == 2
        assert world.tokens.verify(world.token()), "known keys go on"


async def test_a_rotated_key_is_found_and_one_that_was_taken_back_counts_no_more() -> None:
    async with World(Source(jwk("ES256")), refresh_seconds=100) as world:
        world.source.answer = jwks(jwk("ES256"), jwk("EdDSA", "new"))
        await world.settle(REFETCH_SECONDS)
        new = world.token("EdDSA", "new")
        assert isinstance(world.refusal(new), Unavailable)
        await world.settle()
        assert world.tokens.verify(new) and world.tokens.verify(world.token())
        world.source.answer = jwks(jwk("EdDSA", "new"))
        await world.settle(101)
        assert isinstance(world.refusal(world.token()), Unauthorized), "without anybody asking"


BAD: dict[str, bytes | BadJwks | None] = {
    "unreachable": BadJwks("unreachable", "it cannot be reached"),
    "redirect": BadJwks("redirect", "a redirect"),
    "timeout": None,
    "invalid": b"<html>",
    "no_usable_key": b'{"keys": []}',
    "too_large": b" " * (10 * 1024 * 1024),
}


def fetched(result: str) -> float:
    return (
        REGISTRY.get_sample_value("holdfast_access_jwks_fetches_total", {"outcome": result}) or 0.0
    )


@pytest.mark.covers("000 persistent: auth service down")
@pytest.mark.parametrize("reason", BAD)
async def test_keys_stay_in_force_when_a_fetch_fails_and_the_reason_is_logged_once(
    reason: str,
) -> None:
    async with World(Source(jwk("ES256")), refresh_seconds=40) as world:
        world.source.answer, before = BAD[reason], fetched(reason)
        with capture_logs() as logs:
            await world.settle(40 + 4 * (REFETCH_SECONDS + FETCH_SECONDS))
        (line,) = [line for line in logs if line["event"] == "access.jwks_fetch_failed"]
        assert (line["issuer"], line["reason"], line["keys_known"]) == (ISSUER, reason, 1) and line[
            "detail"
        ]
        assert fetched(reason) - before >= 3, "each is counted"
        assert world.tokens.verify(world.token()).user_id == "alice"
        trouble = world.issuers.status()[ISSUER]
        assert trouble["keys"] == 1 and trouble["trouble"] == line["detail"]
        refusal = world.refusal(world.token("EdDSA", "new"))
        assert isinstance(refusal, Unavailable), "nobody knows whether that key exists"
        assert 1 <= (refusal.retry_after_seconds or 0) <= REFETCH_SECONDS
        world.source.answer = jwks(jwk("ES256"), jwk("EdDSA", "new"))
        with capture_logs() as logs:
            await world.settle(REFETCH_SECONDS + FETCH_SECONDS)
        assert [line["event"] for line in logs] == ["access.jwks_fetched"]
        assert world.tokens.verify(world.token("EdDSA", "new"))
        assert world.issuers.status()[ISSUER]["trouble"] is None


@pytest.mark.parametrize("reason", BAD)
async def test_without_any_known_key_the_start_goes_on_and_tokens_are_unavailable(
    reason: str,
) -> None:
    source = Source()
    source.answer = BAD[reason]
    async with World(source) as world:
        refusal = world.refusal(world.token())
        assert isinstance(refusal, Unavailable) and refusal.retry_after_seconds
        await world.settle(FETCH_SECONDS)
        assert isinstance(world.refusal(world.token()), Unavailable)
        assert world.tokens.verify(world.tokens.mint(User("default", "bob"), 60)), (
            "others are not concerned"
        )
        assert world.issuers.status()[ISSUER]["keys"] == 0


async def test_the_last_good_set_outlives_a_restart_without_its_issuer(tmp_path: Path) -> None:
    file = tmp_path / "issuers.json"

    async with World(Source(jwk("ES256")), file):
        pass
    assert file.stat().st_mode & 0o777 == 0o600
    unreachable = Source()
    unreachable.answer = BAD["unreachable"]
    async with World(unreachable, file) as world:
        assert world.tokens.verify(world.token()).user_id == "alice"
        assert isinstance(world.refusal(world.token("EdDSA", "new")), Unavailable)
    async with World(unreachable, file, jwks="https://other.example/jwks.json") as world:
        assert isinstance(world.refusal(world.token()), Unavailable), "another address, other keys"
    kept = file.read_bytes()
    for damaged in (b"{", kept.replace(b"P-256", b"P-999"), b"\xff", b"[{}]"):
        file.write_bytes(damaged)
        with capture_logs() as logs:
            async with World(unreachable, file) as world:
                assert isinstance(world.refusal(world.token()), Unavailable)
        assert "access.kept_keys_unreadable" in [line["event"] for line in logs]


async def test_a_set_that_cannot_be_kept_is_used_all_the_same(tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with World(Source(jwk("ES256")), tmp_path / "nowhere" / "issuers.json") as world:
            assert world.tokens.verify(world.token())
    assert "access.kept_keys_unwritten" in [line["event"] for line in logs]


async def test_issuers_do_not_depend_on_each_other(tmp_path: Path) -> None:
    clock = LoopClock()

    async def fetch(address: str) -> bytes:
        if address == "/hangs":
            await asyncio.Event().wait()
        return jwks(jwk("ES256"))

    settings = [
        IssuerSettings("https://one.example", "/hangs", ("one",)),
        IssuerSettings(ISSUER, URL, ("acme",)),
    ]
    issuers = Issuers(settings, fetch, clock, tmp_path / "issuers.json")
    tokens = Tokens(TokenSettings(), shared_secret(SECRET), clock, issuers=issuers)
    task = asyncio.create_task(issuers.run())
    await asyncio.sleep(0.01)
    assert tokens.verify(signed("ES256", now=clock.now())).tenant == "acme"
    with pytest.raises(Unavailable):
        tokens.verify(signed("ES256", now=clock.now(), iss="https://one.example"))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# --- settings
# --------------------------------------------------------------------------------------

GOOD = {"issuer": ISSUER, "jwks": URL, "tenants": ["acme"]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"issuer": ""}, "must not be empty"),
        ({"audience": ""}, "must not be empty"),
        ({"tenants": []}, "no tenant"),
        ({"tenants": ["*"]}, "must not be"),
        ({"tenants": ["a b"]}, "printable"),
        ({"tenants": "acme"}, "must be a list"),
        ({"scope_claim": "sub"}, "scope_claim"),
        ({"refresh_seconds": 0}, "refresh_seconds"),
        ({"jwks": "keys.json"}, "absolute path"),
        ({"jwks": ""}, "absolute path"),
        ({"jwks": "http://sign-in.example/jwks"}, "https://"),
        ({"jwks": "ftp://sign-in.example/jwks"}, "https://"),
        ({"jwks": "https://user:secret@sign-in.example/jwks"}, "no credentials"),
        ({"jwks": "https:///jwks"}, "needs a host"),
        ({"jwks": "https://[::1/jwks"}, "malformed"),
        ({"jwks": "https://a:99999/jwks"}, "malformed"),
        ({"jwks": None}, "jwks"),
        ({"jwsk": "x"}, r"no setting access.issuers\[0\].jwsk"),
    ],
)
def test_an_issuer_that_cannot_be_is_refused_at_the_start(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    wrong = {name: value for name, value in {**GOOD, **changes}.items() if value is not None}
    with pytest.raises(BadSetting, match=words):
        load(None, {"HOLDFAST_ACCESS__ISSUERS": json.dumps([wrong])}, {})
    if changes != {"jwks": None}:
        file = tmp_path / "holdfast.toml"
        lines = [f"{name} = {json.dumps(value)}" for name, value in wrong.items()]
        file.write_text("\n".join(["[[access.issuers]]", *lines]))
        with pytest.raises(BadSetting, match=words):
            load(file, {}, {})


def test_issuers_come_from_a_file_or_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "holdfast.toml"
    table = f'[[access.issuers]]\nissuer = "{ISSUER}"\njwks = "{URL}"\ntenants = ["acme"]\n'
    file.write_text(
        table + table.replace(ISSUER, "https://two.example").replace(URL, "http://127.0.0.1:9/jwks")
    )
    one, two = load(file, {}, {}).access.issuers
    assert one == IssuerSettings(ISSUER, URL, ("acme",)) and two.issuer == "https://two.example"
    (given,) = load(None, {"HOLDFAST_ACCESS__ISSUERS": json.dumps([GOOD])}, {}).access.issuers
    assert given == one
    ((path, shown, _),) = differences(
        load(None, {"HOLDFAST_ACCESS__ISSUERS": json.dumps([GOOD])}, {})
    )
    assert path == "access.issuers" and load(
        None, {"HOLDFAST_ACCESS__ISSUERS": shown}, {}
    ).access.issuers == (one,)
    for wrong in ("x", "{}", "[1]"):
        with pytest.raises(BadSetting, match=r"access\.issuers"):
            load(None, {"HOLDFAST_ACCESS__ISSUERS": wrong}, {})
    with pytest.raises(BadSetting, match="two issuers are called"):
        load(None, {"HOLDFAST_ACCESS__ISSUERS": json.dumps([GOOD, GOOD])}, {})
    with pytest.raises(BadSetting, match="two issuers are called 'holdfast'"):
        check_issuers([IssuerSettings("holdfast", URL, ("acme",))], "holdfast")
