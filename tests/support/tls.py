"""Certificates for servers of a test."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_PEM = serialization.Encoding.PEM
_Key = ec.EllipticCurvePrivateKey


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for the loopback address that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    return _written(folder, _signed("redis", key, "redis", key, is_ca=True), key)


def issued_certificate(folder: Path) -> tuple[Path, Path, Path]:
    """The certificate of a private CA, one that it issued for the loopback address, and
    the key of that.
    """
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    ca = folder / "ca.pem"
    ca.write_bytes(_signed("ca", ca_key, "ca", ca_key, is_ca=True).public_bytes(_PEM))
    return ca, *_written(folder, _signed("server", key, "ca", ca_key, is_ca=False), key)


def _signed(
    subject: str, key: _Key, issuer: str, issuer_key: _Key, *, is_ca: bool
) -> x509.Certificate:
    now = datetime.now(UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _written(folder: Path, made: x509.Certificate, key: _Key) -> tuple[Path, Path]:
    form, unencrypted = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(_PEM, form, unencrypted))
    (folder / "cert.pem").write_bytes(made.public_bytes(_PEM))
    return folder / "cert.pem", folder / "key.pem"
