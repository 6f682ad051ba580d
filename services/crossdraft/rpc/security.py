"""Mutual TLS between orchestrators and services: each side accepts only certificates of the cluster's CA."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

MAKE = "crossdraft certs DIR --host NAME"
RENEW = "crossdraft certs DIR --renew"
ClientCredentials = grpc.ChannelCredentials
log = logging.getLogger(__name__)


class TlsError(ValueError):
    """Certificates or keys cannot be used; the text names the file and says what to do."""


@dataclass(frozen=True)
class TlsFiles:
    """The PEM files of one side. Each side presents a certificate and accepts only certificates of `ca`."""

    ca: Path  # of the CA, or of several while they are being exchanged
    certificate: Path  # its own first; then those between it and the CA, if there are any
    key: Path  # of the certificate, not encrypted

    def load(self) -> tuple[bytes, bytes, bytes]:
        """CA, key and certificate as PEM, checked. Raises TlsError: one is missing, cannot be read, is damaged or
        expired, or the key belongs to another certificate."""
        ca = _read(self.ca)
        authorities = _certificates(self.ca, ca)
        for authority in authorities:
            _check_authority(self.ca, authority)
        _check_dates(self.ca, max(authorities, key=lambda authority: authority.not_valid_after_utc))
        return ca, *_pair(self.certificate, self.key)


@dataclass(frozen=True)
class FrontFiles:
    """The PEM files of a server whose clients need no certificate of their own."""

    certificate: Path  # its own first; then those between it and the CA, if there are any
    key: Path  # of the certificate, not encrypted

    def load(self) -> tuple[None, bytes, bytes]:
        """As that of TlsFiles, without a CA; raises TlsError."""
        return None, *_pair(self.certificate, self.key)


def trusting_credentials(ca: Path) -> ClientCredentials:
    """Of a client without a certificate, which accepts only servers with one of this CA; raises TlsError."""
    raw = _read(ca)
    _certificates(ca, raw)
    return grpc.ssl_channel_credentials(raw)


T = TypeVar("T")


class Renewed(Generic[T]):
    """What was made of certificate files; made again when they have changed. May be used from any thread.

    Raises TlsError: they cannot be used now.
    """

    def __init__(self, files: TlsFiles | FrontFiles, make: Callable[[], T]) -> None:
        self._files, self._make = files, make
        self._lock = Lock()
        self._stamp = _stamp_of(files)
        self._latest = make()

    def now(self) -> T:
        """The same object while no file has changed, which costs a `stat` call for each."""
        stamp = _stamp_of(self._files)
        with self._lock:
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._latest = self._make()
                except (TlsError, OSError) as error:  # while files are replaced one after another they do not match
                    log.warning("the certificate was not renewed, the one before is used on: %s", error)
            return self._latest


class RenewedCredentials(Renewed[ClientCredentials]):
    """A client's credentials; raises TlsError as `Renewed` does."""

    def __init__(self, files: TlsFiles) -> None:
        super().__init__(files, lambda: grpc.ssl_channel_credentials(*files.load()))


def server_credentials(files: TlsFiles | FrontFiles) -> grpc.ServerCredentials:
    """Of a server; the files are read again when they change. With TlsFiles it accepts only clients of the CA.

    Raises TlsError: they cannot be used now.
    """
    renewed = Renewed(files, lambda: _configuration(files))
    latest = first = renewed.now()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC's threads at each handshake; None: unchanged."""
        nonlocal latest
        before, latest = latest, renewed.now()
        return None if latest is before else latest

    return grpc.dynamic_ssl_server_credentials(
        first,
        changed,  # type: ignore[arg-type]  # the stubs do not know that it may return None
        require_client_authentication=isinstance(files, TlsFiles),
    )


def _configuration(files: TlsFiles | FrontFiles) -> grpc.ServerCertificateConfiguration:
    ca, key, certificate = files.load()
    return grpc.ssl_server_certificate_configuration([(key, certificate)], ca)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise TlsError(f"there is no file {path}: make it with `{MAKE}`, or correct its name") from error
    except OSError as error:
        raise TlsError(f"{path} cannot be read: {error.strerror}; let the user that runs this read it") from error


def _certificates(path: Path, raw: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(raw)
    except ValueError as error:
        raise TlsError(f"{path} is no certificate in PEM: make one with `{MAKE}`") from error


def _private_key(path: Path, raw: bytes) -> EllipticCurvePrivateKey | RSAPrivateKey:
    try:
        key = load_pem_private_key(raw, None)
    except TypeError as error:
        raise TlsError(f"the key {path} is encrypted: write it without a passphrase, readable for its user") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise TlsError(f"{path} is no private key in PEM: make one with `{MAKE}`") from error
    if not isinstance(key, EllipticCurvePrivateKey | RSAPrivateKey):
        raise TlsError(f"the key {path} is of a kind that gRPC does not take: use one of P-256 or RSA")
    return key


def _pair(path: Path, key_path: Path) -> tuple[bytes, bytes]:
    """A key, and its certificate; raises TlsError unless that is valid now, and the key is its own."""
    certificate, key = _read(path), _read(key_path)
    own = _certificates(path, certificate)[0]
    _check_dates(path, own)
    if _private_key(key_path, key).public_key() != own.public_key():
        what = f"the key {key_path} does not belong to the certificate {path}"
        raise TlsError(f"{what}; give the two files that were made together")
    return key, certificate


def _check_authority(path: Path, certificate: x509.Certificate) -> None:
    """Raises TlsError for a certificate that is not a CA's: files are easily swapped."""
    try:
        basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    except x509.ExtensionNotFound:
        return
    if not basic.value.ca:
        raise TlsError(f"{path} is not the certificate of a CA: give the ca.pem that the others have, too")


def _check_dates(path: Path, certificate: x509.Certificate) -> None:
    now, begin, end = datetime.now(UTC), certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end:
        raise TlsError(f"the certificate {path} has expired on {end:%Y-%m-%d %H:%M} UTC: renew it with `{RENEW}`")
    if now < begin:
        what = f"the certificate {path} is not valid before {begin:%Y-%m-%d %H:%M} UTC"
        raise TlsError(f"{what}: check this machine's clock")


def _stamp_of(files: TlsFiles | FrontFiles) -> list[tuple[int, int, int] | None]:
    """Changes when a file does."""
    found: list[tuple[int, int, int] | None] = []
    for path in vars(files).values():
        try:
            at = path.stat()
            found.append((at.st_mtime_ns, at.st_size, at.st_ino))
        except OSError:
            found.append(None)
    return found
