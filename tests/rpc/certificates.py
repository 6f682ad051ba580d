"""Certificates in files, as one likes them: of any CA, for any host, at any time."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from crossdraft.cli.authority import Issued, Purpose, Subject, issue, new_authority
from crossdraft.rpc.security import TlsFiles

LOOPBACK = ("127.0.0.1", "localhost")
PAST = datetime.now(UTC) - timedelta(days=20)
FUTURE = datetime.now(UTC) + timedelta(days=5)


class Cluster:
    """A CA and its files."""

    def __init__(self, folder: Path, begins: datetime | None = None, days: int = 100) -> None:
        self.folder = folder
        folder.mkdir()
        self.authority = new_authority(days, begins)
        (folder / "ca.pem").write_bytes(self.authority.certificate)

    def files(
        self,
        name: str,
        hosts: tuple[str, ...] = LOOPBACK,
        purpose: Purpose = Purpose.BOTH,
        begins: datetime | None = None,
        days: int = 10,
    ) -> TlsFiles:
        """The files of one side; written anew if they are there."""
        return self.write(name, issue(self.authority, Subject(hosts, purpose), days, begins))

    def write(self, name: str, issued: Issued) -> TlsFiles:
        """The same for a certificate that is made already."""
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        key.write_bytes(issued.key)
        certificate.write_bytes(issued.certificate)
        return TlsFiles(self.folder / "ca.pem", certificate, key)
