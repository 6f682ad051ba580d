"""`crossdraft certs`: a private CA in a folder, and certificates for the hosts of a cluster."""

import os
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from crossdraft.cli.running import CommandFailed, UsageError
from crossdraft.config.commands import CertsOptions

CA = "ca"
CA_DAYS = 3650  # how long a CA is valid
SKEW = timedelta(hours=1)  # that the clocks of a cluster may differ by
MAX_COMMON_NAME = 64  # characters, RFC 5280
LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?"
DNS_NAME = re.compile(rf"(?=.{{1,253}}$){LABEL}(\.{LABEL})*", re.IGNORECASE)
SERVES, CONNECTS = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
USES = {"service": (SERVES,), "orchestrator": (CONNECTS,), "both": (SERVES, CONNECTS)}  # the other side checks it
SAID = {"service": "to serve", "orchestrator": "to connect to services", "both": "to serve and to connect"}
Hosts = tuple[str, ...]  # names and addresses of one host, the first of which names it
Wanted = dict[str, tuple[Hosts, str]]  # by the name of its files, a host, and what it may do, of USES


@dataclass(frozen=True)
class Issued:
    """A certificate and its key."""

    certificate: x509.Certificate
    key: EllipticCurvePrivateKey

    @property
    def pem(self) -> tuple[bytes, bytes]:
        """Both, the key not encrypted."""
        key = self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return self.certificate.public_bytes(Encoding.PEM), key


def certs(folder: Path, options: CertsOptions) -> None:
    """Makes the certificates, and prints which file belongs where."""
    try:
        wanted, known = _wanted(folder, options), (folder / f"{CA}.pem").exists()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = _authority(folder) if known or (folder / f"{CA}.key").exists() else issued((), "", CA_DAYS)
        made = {name: issued(hosts, use, options.days, authority) for name, (hosts, use) in wanted.items()}
        for name, one in ({} if known else {CA: authority}).items() | made.items():
            _write(folder, name, one)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise CommandFailed(
            f"{error.filename or folder}: {error.strerror}; name a folder that you may write to"
        ) from error
    ends = f"{authority.certificate.not_valid_after_utc:%Y-%m-%d}"
    print("the CA that exists:" if known else f"made a CA, valid until {ends}:")
    print(f"  {folder}/{CA}.pem: copy it to every host; it is not secret")
    print(f"  {folder}/{CA}.key: keep it here and secret: whoever has it can join the cluster")
    print(f"certificates for {options.days} days:")
    for name, (hosts, use) in wanted.items():
        files = f"{folder}/{name}.pem, {folder}/{name}.key"
        print(f"  {files}: copy them to {name} only ({', '.join(hosts)}; {SAID[use]})")
    example = next(iter(wanted))
    print(f"on {example}, add: --tls-ca {CA}.pem --tls-cert {example}.pem --tls-key {example}.key")
    print("running processes use renewed files as soon as these are replaced, without a restart")


def _wanted(folder: Path, options: CertsOptions) -> Wanted:
    """The named hosts; to renew, with what their certificates name already, or all in the folder if none is named."""
    given: dict[str, Hosts] = {}
    for host in options.host or ():
        hosts = tuple(dict.fromkeys(map(str.strip, host.split(","))))
        name = hosts[0].replace(":", "_")
        if not all(hosts):
            raise UsageError(f"--host {host!r} has an empty name: remove the extra comma")
        if name == CA or name in given:
            raise UsageError(f"--host {host}: the name {name!r} is taken; put another name of the host first")
        given[name] = hosts
    if options.renew:
        given = given or {path.stem: () for path in sorted(folder.glob("*.pem")) if path.stem != CA}
    if not given and options.renew:
        raise CommandFailed(f"{folder} has no certificates to renew: make them with --host, without --renew")
    if not given:
        raise UsageError(
            "name the hosts: --host NAME_OR_ADDRESS; repeat it for more hosts, commas separate names of one"
        )
    wanted: Wanted = {}
    for name, hosts in given.items():
        path, known, use = folder / f"{name}.pem", Hosts(), "both"
        if path.exists() and not options.renew:
            raise CommandFailed(f"{path} exists and is not overwritten: to replace it, add --renew")
        if options.renew:
            known, use = _subject(path)
        wanted[name] = tuple(dict.fromkeys((*known, *hosts))), options.use or use
    return wanted


def _subject(path: Path) -> tuple[Hosts, str]:
    """Whom a certificate that `certs` made is for, and its use; raises CommandFailed."""
    if not path.exists():
        raise CommandFailed(f"there is no certificate {path} to renew: make it without --renew")
    try:
        extensions = x509.load_pem_x509_certificate(path.read_bytes()).extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        purposes = tuple(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
        use = next(use for use, known in USES.items() if known == purposes)
    except (ValueError, x509.ExtensionNotFound, StopIteration) as error:
        text = "this is no certificate that `crossdraft certs` made; it is not renewed"
        raise CommandFailed(f"{path}: {text}") from error
    return tuple(str(name.value) for name in names), use


def _authority(folder: Path) -> Issued:
    """The CA of a folder. Raises ValueError; CommandFailed if one of its files is missing."""
    certificate, key = folder / f"{CA}.pem", folder / f"{CA}.key"
    for path in (certificate, key):
        if not path.exists():
            raise CommandFailed(
                f"{path} is missing, the other file of the CA exists: copy it back, or use a new folder"
            )
    try:
        ca, signing = x509.load_pem_x509_certificate(certificate.read_bytes()), key.read_bytes()
        found = load_pem_private_key(signing, None)
    except (ValueError, TypeError) as error:
        raise ValueError("the files of the CA are damaged: copy them back, or use a new folder") from error
    if not isinstance(found, EllipticCurvePrivateKey) or found.public_key() != ca.public_key():
        raise ValueError("the CA's key does not belong to its certificate: copy both back, or use a new folder")
    return Issued(ca, found)


def issued(hosts: Hosts, use: str, days: int, authority: Issued | None = None, now: datetime | None = None) -> Issued:
    """A certificate with a new key, of a host, signed by a CA; without one a CA, which signs no other CA. Raises
    ValueError: a name is none, or the CA ends before the certificate would."""
    now, key, ca = now or datetime.now(UTC), generate_private_key(SECP256R1()), authority is None
    last = now + timedelta(days=days)
    if authority is not None and last > (ends := authority.certificate.not_valid_after_utc):
        raise ValueError(
            f"the CA ends on {ends:%Y-%m-%d}, so a certificate cannot last {days} days: ask for fewer, or make another "
            "CA in another folder"
        )
    common = hosts[0][:MAX_COMMON_NAME] if hosts else "crossdraft private CA"
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])
    unused = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    unused |= dict.fromkeys(("encipher_only", "decipher_only"), False)
    extensions: list[tuple[x509.ExtensionType, bool]] = [  # and whether they are critical
        (x509.BasicConstraints(ca, 0 if ca else None), True),
        (x509.KeyUsage(digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, **unused), True),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
    ]
    if authority is not None:
        signer = authority.key.public_key()
        extensions += [
            (x509.ExtendedKeyUsage(USES[use]), False),
            (x509.SubjectAlternativeName(map(_general_name, hosts)), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), False),
        ]
    issuer = name if authority is None else authority.certificate.subject
    builder = x509.CertificateBuilder(issuer, name, key.public_key(), x509.random_serial_number(), now - SKEW, last)
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return Issued(builder.sign(key if authority is None else authority.key, hashes.SHA256()), key)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        if not DNS_NAME.fullmatch(host) or host.replace(".", "").isdigit():
            raise ValueError(
                f"{host!r} is neither a host's name nor an address: give it without port, such as node1 or 10.0.0.1"
            ) from None
        return x509.DNSName(host)


def _write(folder: Path, name: str, one: Issued) -> None:
    """Writes the key, readable only by its owner, then the certificate; each file is replaced atomically."""
    certificate, key = one.pem
    for end, content, mode in (("key", key, 0o600), ("pem", certificate, 0o644)):
        new = folder / f"{name}.{end}.new"
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        new.replace(folder / f"{name}.{end}")
