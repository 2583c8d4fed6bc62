"""Certificates for tests of the TCP port: authorities, and what they sign, valid now or long ago."""

import datetime
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """PEM of a certificate and of its key."""

    cert: bytes
    key: bytes

    def write(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Writes NAME.pem and NAME.key; returns both paths."""
        paths = folder / f"{name}.pem", folder / f"{name}.key"
        for path, content in zip(paths, (self.cert, self.key), strict=True):
            path.write_bytes(content)
            path.chmod(0o600)
        return paths


class Authority:
    """A certificate authority of its own."""

    def __init__(self, name: str) -> None:
        self._name = _named(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        builder = _builder(self._name, self._name, self._key, now - _DAY, now + _DAY)
        usage = x509.BasicConstraints(ca=True, path_length=None)
        self._cert = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())

    @property
    def pem(self) -> bytes:
        return self._cert.public_bytes(serialization.Encoding.PEM)

    def server(self) -> Pair:
        """For a server on this machine."""
        return self._sign("server", ExtendedKeyUsageOID.SERVER_AUTH, 0)

    def client(self, *, days_ago: int = 0) -> Pair:
        """For a client; valid for two days, the last of which ended `days_ago` - 1 days before now."""
        return self._sign("client", ExtendedKeyUsageOID.CLIENT_AUTH, days_ago)

    def _sign(self, name: str, use: x509.ObjectIdentifier, days_ago: int) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        middle = datetime.datetime.now(datetime.UTC) - days_ago * _DAY
        alternatives = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
        cert = (
            _builder(_named(name), self._name, key, middle - _DAY, middle + _DAY)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return Pair(
            cert.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(serialization.Encoding.PEM, *form),
        )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    begin: datetime.datetime,
    end: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
