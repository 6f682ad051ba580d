"""Files that a configuration names, as they are where it is deployed from: other contents make another service."""

from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from crossdraft.rpc.security import TlsFiles

ABSENT = ""  # in place of the digest of a file that is on other nodes only


def contents(paths: Iterable[Path]) -> tuple[str, ...]:
    """The digest of each file, not of its name."""
    return tuple(_digest(path) for path in paths)


def tls_paths(tls: TlsFiles | None) -> tuple[Path, ...]:
    """The files, if there are any."""
    return () if tls is None else (tls.ca, tls.certificate, tls.key)


def _digest(path: Path) -> str:
    try:
        return sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ABSENT
