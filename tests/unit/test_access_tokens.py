"""User tokens: what is taken, and every way we know to forge one."""

from __future__ import annotations

import base64
import hmac
import json
from collections.abc import Iterator
from string import ascii_letters, digits
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from msgspec.structs import replace

from holdfast.access.principal import Principal
from holdfast.access.tokens import TokenKey, Tokens, TokenSettings, shared_secret
from holdfast.clock import ManualClock
from holdfast.errors import BadSetting, InvalidMessage, Unauthorized
from holdfast.message import User

SECRET = b"0123456789abcdef0123456789abcdef"
ALICE = User("acme", "alice")
ALPHABET = ascii_letters + digits + "-_"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_700_000_000)


@pytest.fixture
def tokens(clock: ManualClock) -> Tokens:
    return Tokens(TokenSettings(), shared_secret(SECRET), clock)


def claims(**changed: Any) -> dict[str, Any]:
    """Good claims, with some changed; None removes one."""
    good = {
        "iss": "holdfast", "aud": "holdfast", "sub": "alice", "tenant": "acme",
        "iat": 1_700_000_000, "exp": 1_700_000_060,
    }  # fmt: skip
    return {name: value for name, value in {**good, **changed}.items() if value is not None}


def sign(payload: object, secret: bytes = SECRET, algorithm: str = "HS256", **headers: Any) -> str:
    """Signed by hand: a library refuses to make most of what an attacker makes."""
    signing_input = f"{segment({'alg': algorithm, 'typ': 'JWT', **headers})}.{segment(payload)}"
    digest = {"HS256": "sha256", "HS512": "sha512"}[algorithm]
    return f"{signing_input}.{encode(hmac.digest(secret, signing_input.encode(), digest))}"


def encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def segment(value: object) -> str:
    return encode(json.dumps(value).encode())


def unsigned(header: dict[str, Any]) -> str:
    return f"{segment(header)}.{segment(claims())}."


def test_a_minted_token_speaks_for_its_user_until_it_expires(
    tokens: Tokens, clock: ManualClock
) -> None:
    principal = tokens.verify(tokens.mint(ALICE, 60))
    expected = Principal(
        "acme", "alice", frozenset({"chats:read", "chats:send"}), "user", 1_700_000_060.0
    )
    assert principal == replace(expected, issued_at=1_700_000_000.0, token_id=principal.token_id)
    assert principal.user == ALICE
    assert (
        principal.token_id.startswith("tok_")
        and principal.token_id != tokens.verify(tokens.mint(ALICE, 60)).token_id
    )


def test_a_token_that_lives_longer_than_any_may_is_refused(
    tokens: Tokens, clock: ManualClock
) -> None:
    now, longest = 1_700_000_000, 30 * 86400
    tokens.verify(sign(claims(exp=now + longest)))
    forever = sign(claims(exp=now + 2 * longest))
    for exp, iat in (
        (now + longest + 6, now),
        (now + longest + 6, now + 5),
        (now + longest, now - 6),
    ):
        with pytest.raises(
            Unauthorized, match=r"longer than 2592000 s.*access\.tokens\.ttl_seconds_max"
        ):
            tokens.verify(sign(claims(exp=exp, iat=iat)))
    clock.advance(1.5 * longest)
    # also near its end: a revocation may have ended before it
    with pytest.raises(Unauthorized, match="lives longer"):
        tokens.verify(forever)


def test_a_token_has_an_id_to_be_revoked_by_whoever_made_it(tokens: Tokens) -> None:
    assert tokens.verify(sign(claims(jti="a-jti"))).token_id == "a-jti"
    for jti in (None, "", "x" * 65, "with space", "sha256:" + "0" * 64):
        token = sign(claims(jti=jti))
        found = tokens.verify(token).token_id
        assert found.startswith("sha256:") and len(found) > 64, "no jti can pass for it"
        assert tokens.verify(token + "=" * (-len(token.rpartition(".")[2]) % 4)).token_id == found


@pytest.mark.parametrize("leeway", [0, 5, 60])
def test_no_token_is_good_after_a_revocation_of_it_has_ended(
    clock: ManualClock, leeway: float
) -> None:
    """Of every token that may be shown when it is revoked, or later: at each moment at
    which it could be good again.
    """
    ttl, now = 100.0, clock.now()
    tokens = Tokens(
        TokenSettings(leeway_seconds=leeway, ttl_seconds_max=ttl), shared_secret(SECRET), clock
    )
    times = [now + offset for offset in (-ttl, -1, 0, 1, leeway, leeway + 1)]
    lives = [1, ttl, ttl + leeway, ttl + leeway + 1, 2 * ttl, 5 * ttl]
    made = [sign(claims(iat=iat, exp=iat + life)) for iat in times for life in lives]
    made += [sign(claims(iat=None, exp=now + life)) for life in lives]
    good = [token for token in made if readable(tokens, token)]
    ends_at = now + tokens.longest_seconds
    assert (
        len(good) >= 8 and max(tokens.read(token).expires_at for token in good) + leeway <= ends_at
    )
    found = {
        token: tokens.read(token, early=True).issued_at
        for token in made
        if readable(tokens, token, early=True)
    }
    early = {token: issued_at for token, issued_at in found.items() if issued_at > now + leeway}
    while clock.now() < now + 8 * ttl:
        clock.advance(ttl / 4)
        for token in made:
            revoked = clock.now() < max(now, early.get(token, now)) + tokens.longest_seconds
            assert revoked or not readable(tokens, token)


def readable(tokens: Tokens, token: str, *, early: bool = False) -> bool:
    try:
        tokens.read(token, early=early)
    except Unauthorized:
        return False
    return True


def test_a_revoked_token_is_refused_and_can_still_be_read_by_whoever_revokes_it(
    clock: ManualClock,
) -> None:
    def check(principal: Principal) -> None:
        raise Unauthorized(f"{principal.token_id} was revoked")

    tokens = Tokens(TokenSettings(), shared_secret(SECRET), clock, check)
    token = sign(claims(jti="j"))
    assert tokens.read(token).token_id == "j"
    with pytest.raises(Unauthorized, match="j was revoked"):
        tokens.verify(token)


def test_a_token_dies_when_its_leeway_is_over(tokens: Tokens, clock: ManualClock) -> None:
    token = tokens.mint(ALICE, 60)
    clock.advance(64.9)
    tokens.verify(token)
    clock.advance(0.1)
    with pytest.raises(Unauthorized, match="expired"):
        tokens.verify(token)


def test_token_without_a_tenant_belongs_to_the_default_tenant(
    tokens: Tokens,
) -> None:
    assert tokens.verify(sign(claims(tenant=None))).tenant == "default"


def test_a_token_without_a_tenant_is_refused_where_there_is_no_default(clock: ManualClock) -> None:
    strict = Tokens(TokenSettings(default_tenant=None), shared_secret(SECRET), clock)
    with pytest.raises(Unauthorized, match="tenant"):
        strict.verify(sign(claims(tenant=None)))


ATTACKS: dict[str, tuple[str, str]] = {
    "alg none": (unsigned({"alg": "none", "typ": "JWT"}), "not valid here"),
    "alg NONE in capitals": (unsigned({"alg": "NONE"}), "not valid here"),
    "no alg at all": (unsigned({"typ": "JWT"}), "not valid here"),
    "another HMAC than the pinned one": (sign(claims(), algorithm="HS512"), "not valid here"),
    "signed with another secret": (sign(claims(), b"x" * 32), "not valid here"),
    "signed with the empty secret": (sign(claims(), b""), "not valid here"),
    "a signature cut off": (sign(claims())[:-4], "not valid here"),
    "claims swapped under a good signature": (
        ".".join(
            (sign(claims()).split(".")[0], segment(claims(sub="bob")), sign(claims()).split(".")[2])
        ),
        "not valid here",
    ),
    "an unknown kid": (sign(claims(), kid="../../etc/passwd"), "not valid here"),
    "a kid that is not a string": (unsigned({"alg": "HS256", "kid": ["a"]}), "not valid here"),
    "a payload said to be as it is": (sign(claims(), b64=False), "not valid here"),
    "a critical header that is none": (sign(claims(), crit=[]), "not valid here"),
    "an unknown critical header": (sign(claims(), crit=["x"], x=1), "not valid here"),
    "a key smuggled in the header": (
        sign(claims(), b"x" * 32, jwk={"kty": "oct", "k": base64.b64encode(b"x" * 32).decode()}),
        "not valid here",
    ),
    "no exp": (sign(claims(exp=None)), "lacks the claim exp"),
    "no aud": (sign(claims(aud=None)), "lacks the claim aud"),
    "no iss": (sign(claims(iss=None)), "lacks the claim iss"),
    "no sub": (sign(claims(sub=None)), "lacks the claim sub"),
    "another audience": (sign(claims(aud="other")), "audience"),
    "an audience among others that are no text": (sign(claims(aud=["holdfast", 7])), "audience"),
    "an audience that is part of ours": (sign(claims(aud="hold")), "audience"),
    "an audience that is a number": (sign(claims(aud=7)), "audience"),
    "no audience in the list": (sign(claims(aud=[])), "audience"),
    "an issuer in a list": (sign(claims(iss=["holdfast"])), "issuer"),
    "a jti that is not a string": (sign(claims(jti=7)), "claim jti must be a string"),
    "sub not a string": (sign(claims(sub=7)), "sub must be a string"),
    "another issuer": (sign(claims(iss="other")), "issuer"),
    "expired": (sign(claims(exp=1_699_999_000)), "expired"),
    "not yet valid": (sign(claims(nbf=1_700_000_030)), "not valid yet"),
    "issued in the future": (sign(claims(iat=1_700_000_030)), "not valid yet"),
    "exp as text": (sign(claims(exp="1800000000")), "exp must be a number"),
    "exp as true": (sign(claims(exp=True)), "exp must be a number"),
    "exp beyond all numbers": (sign(claims(exp=1e300)), "exp must be a number"),
    "exp infinite": (sign(claims(exp=float("inf"))), "exp must be a number"),
    "exp not a number": (sign(claims(exp=float("nan"))), "exp must be a number"),
    "sub empty": (sign(claims(sub="")), "sub must not be empty"),
    "sub with a line break": (sign(claims(sub="a\nb")), "printable"),
    "sub too long": (sign(claims(sub="a" * 65)), "at most 64"),
    "tenant not a string": (sign(claims(tenant=7)), "tenant must be a string"),
    "tenant empty": (sign(claims(tenant="")), "tenant must not be empty"),
    "huge": (sign(claims(sub="a" * 100_000)), "longer than"),
    "empty": ("", "not valid here"),
    "garbage": ("garbage", "not valid here"),
    "three dots": ("...", "not valid here"),
    "binary": ("\x00\xff.\x00.\x00", "not valid here"),
    "not ASCII": ("é.é.é", "not valid here"),
    "a lone surrogate": ("\ud800.a.b", "not valid here"),
    "a header that is a list": (f"{segment([1])}.{segment(claims())}.AAAA", "not valid here"),
    "claims that are a list": (
        sign(claims()).split(".")[0] + f".{segment([1])}.AAAA",
        "not valid here",
    ),
    "claims that are a list, well signed": (sign([1]), "not valid here"),
    "a depth bomb": (segment({"alg": "HS256"}) + "." + "W1tb" * 900 + ".AAAA", "not valid here"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_forged_or_broken_token_is_refused_with_a_reason_that_leaks_nothing(
    attack: str, tokens: Tokens
) -> None:
    token, reason = ATTACKS[attack]
    with pytest.raises(Unauthorized, match=reason) as caught:
        tokens.verify(token)
    assert SECRET.decode() not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_token_may_be_meant_for_others_too(tokens: Tokens) -> None:
    assert tokens.verify(sign(claims(aud=["others", "holdfast"]))).user == ALICE


def written_otherwise(token: str) -> Iterator[str]:
    """The same token, or one like it, in every other way we know to write it."""
    parts = token.split(".")
    for place, part in enumerate(parts):
        last = part[-1]
        padded = part + "=" * (-len(part) % 4)
        for other in (
            *(
                part[:-1] + character for character in ALPHABET + "+/" if character != last
            ),  # bits that count for nothing
            *(
                part + tail
                for tail in ("=", "==", "===", "A", "AA", "\n", " ", "\x00", "!", ".", ".A", "é")
            ),
            *(
                padded,
                part[:5] + "=" + part[5:],
                part[:5] + "\n" + part[5:],
                part[:5] + "!!!!" + part[5:],
            ),
            *(
                " " + part,
                "=" + part,
                part[:-1],
                part[:-2],
                "",
                part.replace("-", "+").replace("_", "/"),
            ),
        ):
            yield ".".join((*parts[:place], other, *parts[place + 1 :]))


def test_every_way_to_write_a_token_is_taken_or_refused_as_the_library_would(
    tokens: Tokens,
) -> None:
    seen = set()
    for sub in ("alice", "alice1", "alice12", "???>>>~~~"):
        for other in written_otherwise(sign(claims(sub=sub))):
            try:
                expected: str | None = jwt.decode(
                    other,
                    SECRET,
                    ["HS256"],
                    audience="holdfast",
                    issuer="holdfast",
                    options={"verify_exp": False},
                )["sub"]
            except (jwt.PyJWTError, ValueError):
                expected = None
            try:
                found: str | None = tokens.verify(other).user_id
            except Unauthorized:
                found = None
            assert found == expected, other
            seen.add(found is None)
    assert seen == {True, False}


def test_a_depth_bomb_under_a_good_signature_is_refused(tokens: Tokens) -> None:
    bomb = b'{"a":' + b"[" * 1400 + b"]" * 1400 + b"}"
    token = jwt.api_jws.encode(bomb, SECRET, "HS256")
    with pytest.raises(Unauthorized):
        tokens.verify(token)


def test_a_public_key_cannot_be_used_as_an_hmac_secret(clock: ManualClock) -> None:
    """The classic confusion: HS256, signed with the PEM text of the public key."""
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    key = TokenKey("RS256", private.public_key())
    tokens = Tokens(TokenSettings(), lambda kid: (key,), clock)
    with pytest.raises(Unauthorized):
        tokens.verify(sign(claims(), pem))
    assert tokens.verify(jwt.encode(claims(), private, "RS256")).user == ALICE
    with pytest.raises(BadSetting, match="minted elsewhere"):
        tokens.mint(ALICE, 60)


def test_a_key_that_cannot_be_used_is_refused_when_it_is_made() -> None:
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    for algorithm, key in (
        ("HS256", pem),
        ("HS256", b"short"),
        ("RS256", SECRET),
        ("none", None),
        ("HS257", SECRET),
    ):
        with pytest.raises(BadSetting, match="cannot be used"):
            TokenKey(algorithm, key)


def test_a_short_secret_is_refused_at_start() -> None:
    with pytest.raises(BadSetting, match="at least 32"):
        shared_secret(b"hunter2")


@pytest.mark.parametrize("ttl", [0, -1, 31 * 86400, float("nan"), float("inf")])
def test_token_cannot_live_without_end(ttl: float, tokens: Tokens) -> None:
    with pytest.raises(InvalidMessage, match="ttl_seconds"):
        tokens.mint(ALICE, ttl)


@pytest.mark.parametrize(
    "bad", [{"issuer": ""}, {"audience": ""}, {"leeway_seconds": 61}, {"ttl_seconds_max": 0}]
)
def test_bad_token_settings_are_refused_when_built(bad: dict[str, Any]) -> None:
    with pytest.raises(BadSetting):
        TokenSettings(**bad)
