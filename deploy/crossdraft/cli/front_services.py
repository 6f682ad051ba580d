"""The options of `crossdraft serve http` and `serve grpc` that say what is served from where."""

from dataclasses import dataclass

from crossdraft.cli.failures import Misused
from crossdraft.cli.generate import check_address
from crossdraft.cli.running import checked_options
from crossdraft.pipeline.connection import addresses_of
from crossdraft.rpc.security import TlsFiles
from crossdraft.serving.local import LocalModel, NamedDrafter


@dataclass(frozen=True)
class Services:
    """The options that say what is served from where, as they were typed."""

    model: str
    targets: tuple[str, ...]
    drafters: tuple[str, ...]  # NAME=HOST:PORT,...
    untrusted: frozenset[str]  # names of drafters
    tls: TlsFiles | None

    @property
    def local(self) -> LocalModel:
        """The same, checked; raises Misused."""
        targets = _addresses("--target", ",".join(self.targets))
        drafters = tuple(self._drafter(one) for one in self.drafters)
        unknown = self.untrusted - {one.name for one in drafters}
        if unknown:
            raise Misused(f"--untrusted-drafter names {sorted(unknown)[0]!r}, which no --drafter has")
        with checked_options():
            return LocalModel(self.model, targets, drafters)

    def _drafter(self, given: str) -> NamedDrafter:
        name, equals, addresses = given.partition("=")
        if not (name and equals):
            raise Misused(f"--drafter must be NAME=HOST:PORT, such as small=127.0.0.1:7002, got {given!r}")
        return NamedDrafter(name, _addresses("--drafter", addresses), name not in self.untrusted)


def _addresses(option: str, given: str) -> tuple[str, ...]:
    for one in given.split(","):
        check_address(option, one.strip())
    return addresses_of(given)
