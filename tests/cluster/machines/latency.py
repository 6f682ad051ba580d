"""The tables of BENCHMARKS.md about latency between nodes: `python -m tests.cluster.machines.latency`, as root.

Five machines, a head and one for each kind of process. `deploy/loadtest/cluster.py` runs on the front's machine, once
without delay and then with that of one machine's link after the other.
"""

import argparse
import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.cluster.machines.machines import Machine
from tests.cluster.machines.person import CONFIGURATION, FILE, REPOSITORY, Person, person

OFFERS = {
    "front": '{"ingress": 8}',
    "orchestrator": '{"orchestrator": 8}',
    "target": '{"target": 1}',
    "drafter": '{"drafter": 1}',
}
LINKS = {"front": "front and orchestrator", "target": "orchestrator and target", "drafter": "orchestrator and drafter"}
SCRIPT = REPOSITORY / "deploy" / "loadtest" / "cluster.py"


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Person]:
    """Who has a cluster of these machines up, with nothing deployed."""
    async with person(["head", *OFFERS], folder) as somebody:
        somebody.spare()
        for name, offer in OFFERS.items():
            await somebody.machines[name].run(f"mkdir -p ~/crossdraft && echo '{offer}' > ~/crossdraft/offers.json")
        await somebody.make_wheel()
        await somebody.ray("get-auth-token", "--generate")
        await somebody.ray("up", "--yes", FILE)
        await somebody.all_alive(300.0)
        yield somebody


async def measured(somebody: Person, *options: str) -> str:
    """What the script writes."""
    at: dict[str, Machine] = {name: somebody.machines[name] for name in OFFERS}
    nodes = " ".join(f"--{name} {machine.address}" for name, machine in at.items())
    line = f"python {SCRIPT} {CONFIGURATION} {nodes} {' '.join(options)}"
    command = at["front"].ssh(f"bash -ic '{line}'")
    return await somebody.run("cluster.py", *command, seconds=1200.0)


async def tables(delays: Sequence[float], options: Sequence[str], folder: Path) -> None:
    """Prints them."""
    async with cluster(folder) as somebody:
        print(await measured(somebody, *options), flush=True)
        for name, link in LINKS.items():
            for delay in filter(None, delays):
                await somebody.machines[name].link.delay(delay)
                print(f"{link}: {delay:g} ms, one way", flush=True)
                print(await measured(somebody, "--keep", *options), flush=True)
            await somebody.machines[name].link.delay(0.0)


def main() -> None:
    """The command; options of `crossdraft loadtest` may follow."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delays", default="0,5,20", help="ms, one way")
    given, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        asyncio.run(tables([float(one) for one in given.delays.split(",")], options, Path(folder)))


if __name__ == "__main__":
    main()
