"""The tables of BENCHMARKS.md about latency between nodes: `python -m tests.cluster.machines.latency`, as root.

Five machines, a head and one for each kind of process. `deploy/loadtest/cluster.py` runs on the front's machine, once
without delay and then with that of one machine's link after the other.
"""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.machines.machines import Machine
from tests.cluster.machines.person import CONFIGURATION, OFFERS, REPOSITORY, Person, person

LINKS = {"front": "front and orchestrator", "target": "orchestrator and target", "drafter": "orchestrator and drafter"}
SCRIPT = REPOSITORY / "deploy" / "loadtest" / "cluster.py"


async def measured(somebody: Person, *options: str) -> str:
    """What the script writes."""
    at: dict[str, Machine] = {name: somebody.machines[name] for name in OFFERS}
    nodes = " ".join(f"--{name} {machine.address}" for name, machine in at.items())
    line = f"python {SCRIPT} {CONFIGURATION} {nodes} {' '.join(options)}"
    command = at["front"].ssh(f"bash -ic '{line}'")
    return await somebody.run("cluster.py", *command, seconds=1200.0)


async def tables(delays: Sequence[float], options: Sequence[str], folder: Path) -> None:
    """Prints them."""
    async with person(["head", *OFFERS], folder) as somebody:
        await somebody.bring_up()
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
