"""A private CA for one cluster, and the certificates that it signs."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SKEW = timedelta(hours=1)  # that the clocks of a cluster may differ by
LONGEST_COMMON_NAME = 64  # characters, RFC 5280
LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?"
DNS_NAME = re.compile(rf"(?=.{{1,253}}$){LABEL}(\.{LABEL})*", re.IGNORECASE)


class AuthorityError(ValueError):
    """A certificate cannot be made; the text says what to change."""


class Purpose(StrEnum):
    """What a certificate may be used for; the other side's TLS checks it."""

    SERVICE = "service"  # to be connected to
    ORCHESTRATOR = "orchestrator"  # to connect
    BOTH = "both"


EXTENDED_KEY_USAGES = {
    Purpose.SERVICE: (ExtendedKeyUsageOID.SERVER_AUTH,),
    Purpose.ORCHESTRATOR: (ExtendedKeyUsageOID.CLIENT_AUTH,),
    Purpose.BOTH: (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH),
}


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, as PEM."""

    certificate: bytes
    key: bytes  # not encrypted


@dataclass(frozen=True)
class Subject:
    """Whom a certificate is for."""

    hosts: tuple[str, ...]  # names and addresses, the first of which names it
    purpose: Purpose = Purpose.BOTH

    def __post_init__(self) -> None:
        if not self.hosts:
            raise AuthorityError("a certificate needs at least one host name or address")
        for host in self.hosts:
            _general_name(host)


def new_authority(days: int, now: datetime | None = None) -> Issued:
    """A CA that signs certificates of hosts, and no other CA."""
    key = generate_private_key(SECP256R1())
    name = _name("crossdraft private CA")
    builder = (
        _dated(days, now or datetime.now(UTC))
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _signed(builder, key, key)


def issue(authority: Issued, subject: Subject, days: int, now: datetime | None = None) -> Issued:
    """A certificate of the CA, with a new key.

    Raises:
        AuthorityError: the CA ends before it would, or its files are damaged or do not belong together.
    """
    now = now or datetime.now(UTC)
    ca, signing = _loaded(authority)
    if now + timedelta(days=days) > ca.not_valid_after_utc:
        raise AuthorityError(
            f"the CA ends on {ca.not_valid_after_utc:%Y-%m-%d}, so a certificate cannot last {days} days: "
            "ask for fewer, or make another CA in another folder"
        )
    key = generate_private_key(SECP256R1())
    builder = (
        _dated(days, now)
        .subject_name(_name(subject.hosts[0]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(EXTENDED_KEY_USAGES[subject.purpose]), critical=False)
        .add_extension(x509.SubjectAlternativeName(map(_general_name, subject.hosts)), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
    )
    return _signed(builder, key, signing)


def _loaded(authority: Issued) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
    try:
        ca, signing = x509.load_pem_x509_certificate(authority.certificate), load_pem_private_key(authority.key, None)
    except (ValueError, TypeError) as error:
        raise AuthorityError("the files of the CA are damaged: copy them back, or use a new folder") from error
    if not isinstance(signing, EllipticCurvePrivateKey) or signing.public_key() != ca.public_key():
        raise AuthorityError("the CA's key does not belong to its certificate: copy both back, or use a new folder")
    return ca, signing


def subject_of(certificate: bytes) -> Subject:
    """Whom a certificate in PEM that `issue` made is for; raises AuthorityError if it is none."""
    try:
        extensions = x509.load_pem_x509_certificate(certificate).extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        purposes = tuple(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
        use = next(use for use, known in EXTENDED_KEY_USAGES.items() if known == purposes)
    except (ValueError, x509.ExtensionNotFound, StopIteration) as error:
        raise AuthorityError("this is no certificate that `crossdraft certs` made") from error
    return Subject(tuple(str(name.value) for name in names), use)


def ends(certificate: bytes) -> datetime:
    """When a certificate in PEM ends, in UTC."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        if not DNS_NAME.fullmatch(host) or host.replace(".", "").isdigit():
            raise AuthorityError(
                f"{host!r} is neither a host's name nor an address: give it without port, such as node1 or 10.0.0.1"
            ) from None
        return x509.DNSName(host)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:LONGEST_COMMON_NAME])])


def _dated(days: int, now: datetime) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - SKEW).not_valid_after(now + timedelta(days=days))


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    usages = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    usages |= dict.fromkeys(("key_cert_sign", "crl_sign"), signs_certificates)
    return x509.KeyUsage(digital_signature=not signs_certificates, encipher_only=False, decipher_only=False, **usages)


def _signed(builder: x509.CertificateBuilder, key: EllipticCurvePrivateKey, signing: EllipticCurvePrivateKey) -> Issued:
    certificate = builder.sign(signing, hashes.SHA256()).public_bytes(Encoding.PEM)
    return Issued(certificate, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
