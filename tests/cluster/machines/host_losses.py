"""Seeded streams while a host falls silent: `python -m tests.cluster.machines.host_losses`, in a checkout, as root.

Five machines: a head that can do everything, and one for each role beside it. All links of one are cut, so that nobody
is told, and its processes killed; clients ask the fronts of the head, of the host with fronts, and the proxy of the
host with orchestrators, which has none. The head goes on alone where all others are lost, one after the other.
"""

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.machines.person import FILE, OFFERS, PORT, REPOSITORY, Person, deploy, person, processes
from tests.cluster.machines.streams import REPEATS, Stream, Streams, client_of, faults_of

HEAD = '{"ingress": 8, "target": 1, "orchestrator": 8, "drafter": 1}'
AFTER = 15.0  # seconds that clients go on after a loss
KNOWN_SECONDS = 300.0
ROLES = {"front": ["http", "grpc"]}  # of a host that has not only what it is named after
HEADINGS = ("host lost", "streams", "broken", "texts that differ", "worst pause, by the clients' front")
ASKED = ("head", "front", "orchestrator")  # hosts that clients ask


@dataclass(frozen=True)
class Loss:
    """What became of the streams whose clients asked a host that was not lost."""

    host: str
    at: float  # seconds of the monotonic clock
    streams: dict[str, Sequence[Stream]]  # by the host that was asked
    faults: Sequence[str]

    @property
    def row(self) -> tuple[str, ...]:
        """Of a table."""
        ended = [stream for streams in self.streams.values() for stream in streams]
        broken = sum(bool(one.fault) for one in ended)
        pauses = {host: max(one.pause(self.at) or 0.0 for one in ones) for host, ones in self.streams.items()}
        repeats = {host: sum(one.repeats for one in ones) for host, ones in self.streams.items()}
        written = (
            f"{host} {pause:.2f} s" + (f" ({repeats[host]} asked again)" if repeats[host] else "")
            for host, pause in pauses.items()
        )
        return (self.host, str(len(ended)), str(broken), str(len(self.faults) - broken), ", ".join(written))


async def loss(
    somebody: Person, host: str, fronts: Sequence[str], clients: int, tokens: int, undisturbed: Sequence[Stream]
) -> Loss:
    """A host is switched off, and nobody told, while streams run through `fronts`."""
    seeds, over = range(1, clients + 1), asyncio.Event()
    async with AsyncExitStack() as stack:
        asked = {}
        for name in fronts:  # on a machine with too much to do, a proxy may take its own front for lost
            client = await stack.enter_async_context(client_of(f"http://{somebody.machines[name].address}:{PORT}"))
            asked[name] = Streams(client, seeds, tokens, REPEATS)
        running = {name: asyncio.create_task(streams.keep_on(over)) for name, streams in asked.items()}
        await asyncio.gather(*(streams.under_way() for streams in asked.values()))
        at = time.monotonic()
        await somebody.machines[host].switch_off()
        await asyncio.sleep(AFTER)
        over.set()
        if host in running:
            unheard = running.pop(host)
            unheard.cancel()
            await asyncio.wait([unheard])
        ended = {name: await task for name, task in running.items()}
    faults = [fault for streams in ended.values() for fault in faults_of(streams, undisturbed)]
    return Loss(host, at, ended, faults)


async def measure(
    hosts: Sequence[str], clients: int, tokens: int, folder: Path, sources: Path = REPOSITORY
) -> list[Loss]:
    """The hosts are lost one after the other, of a cluster that is brought up for it."""
    async with person(["head", *OFFERS], folder) as somebody:
        somebody.replace(FILE, """'{"ingress": 8}'""", f"'{HEAD}'")
        await somebody.bring_up(sources)
        await deploy(somebody)
        async with client_of(somebody.url) as client:
            undisturbed = await Streams(client, range(1, clients + 1), tokens).run()
        left, fronts, losses = Counter(one["role"] for one in await processes(somebody)), list(ASKED), list[Loss]()
        print("processes:", dict(left), flush=True)
        for host in hosts:
            losses.append(await loss(somebody, host, fronts, clients, tokens, undisturbed))
            print(*losses[-1].row, *losses[-1].faults[:3], sep=" | ", flush=True)
            left -= Counter(ROLES.get(host, [host]))
            fronts = [one for one in fronts if one != host]
            await known(somebody, left)
    return losses


async def known(somebody: Person, left: Counter[str]) -> None:
    """Returns once all know what there is."""
    until = time.monotonic() + KNOWN_SECONDS
    while (found := Counter(one["role"] for one in await processes(somebody))) != left:
        assert time.monotonic() < until, f"there is {dict(found)}, not {dict(left)}"
        await asyncio.sleep(1.0)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of Markdown."""
    for row in (headings, ["---"] * len(headings), *rows):
        yield f"| {' | '.join(row)} |"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=4, help="of each front, that stream at once")
    parser.add_argument("--tokens", type=int, default=100, help="of each output")
    parser.add_argument("--times", type=int, default=3, help="that a cluster is brought up, and each host lost")
    parser.add_argument("--only", choices=OFFERS, help="this host")
    parser.add_argument("--sources", type=Path, default=REPOSITORY, help="another checkout, whose wheel is measured")
    given = parser.parse_args()
    rows = []
    for _ in range(given.times):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            hosts = [given.only] if given.only else list(OFFERS)
            measured = measure(hosts, given.clients, given.tokens, Path(folder), given.sources)
            rows += [one.row for one in asyncio.run(measured)]
    print(*table(HEADINGS, rows), sep="\n")


if __name__ == "__main__":
    main()
