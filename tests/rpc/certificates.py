"""Certificates in files, as one likes them: of any CA, for any host, at any time."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from crossdraft.cli.certs import Issued, issued
from crossdraft.rpc.security import TlsFiles

LOOPBACK = ("127.0.0.1", "localhost")
PAST = datetime.now(UTC) - timedelta(days=20)
FUTURE = datetime.now(UTC) + timedelta(days=5)


class Cluster:
    """A CA and its files."""

    def __init__(self, folder: Path, begins: datetime | None = None, days: int = 100) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.authority = issued((), "", days, now=begins)
        (folder / "ca.pem").write_bytes(self.authority.pem[0])

    def files(self, name: str, hosts: tuple[str, ...] = LOOPBACK, use: str = "both", begins=None, days=10) -> TlsFiles:
        """The files of one side, valid from that time on for so many days; written anew if they are there."""
        return self.write(name, issued(hosts, use, days, self.authority, begins))

    def write(self, name: str, made: Issued) -> TlsFiles:
        """The same for a certificate that is made already."""
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        for path, content in zip((certificate, key), made.pem, strict=True):
            path.write_bytes(content)
        return TlsFiles(self.folder / "ca.pem", certificate, key)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "ours")
