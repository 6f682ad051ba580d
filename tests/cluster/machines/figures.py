"""The figures of BENCHMARKS.md about clusters: `python -m tests.cluster.machines.figures`, in a checkout, as root.

Five machines: a head, two for targets and orchestrators, two for drafters. Commands are those of docs/cluster.md. What
happens to seeded streams when something is lost or changed is measured by their clients.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Iterator, Sequence
from pathlib import Path

from tests.cluster.machines.events import CONFIGURED, HEADINGS, Disturbed, deploy
from tests.cluster.machines.person import FILE, Person, person, said
from tests.cluster.machines.streams import client_of, first_piece

OFFERS = {
    "target-1": '{"target": 1, "orchestrator": 8, "ingress": 8}',
    "target-2": '{"target": 1, "orchestrator": 8, "ingress": 8}',
    "drafter-1": '{"drafter": 2}',
    "drafter-2": '{"drafter": 2}',
}


async def bring_up(somebody: Person) -> list[tuple[str, float]]:
    """From a checkout to the first token; what each step took, seconds."""
    for name, offer in OFFERS.items():
        await said(somebody.machines[name], f"mkdir -p ~/crossdraft && echo '{offer}' > ~/crossdraft/offers.json")
    began = time.monotonic()
    await somebody.make_wheel()
    await somebody.ray("get-auth-token", "--generate")
    await somebody.ray("up", "--yes", FILE)
    await timed(somebody, "until all machines are nodes", somebody.all_alive(300.0))
    await deploy(somebody)
    async with client_of(somebody.url) as client:
        await timed(somebody, "first token by the openai client", first_piece(client))
    steps = [(name, seconds) for name, seconds in somebody.seconds.items() if not name.startswith("python on")]
    return [*steps, ("all of it", time.monotonic() - began)]


async def timed(somebody: Person, name: str, step: Awaitable[object]) -> None:
    """Waits for a step, and notes what it took."""
    began = time.monotonic()
    await step
    somebody.seconds[name] = time.monotonic() - began


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of Markdown."""
    for row in (headings, ["---"] * len(headings), *rows):
        yield f"| {' | '.join(row)} |"


async def measure(clients: int, tokens: int, wanted: str, folder: Path) -> dict[str, object]:
    """Prints the tables; returns what they say."""
    load = os.getloadavg()[0]
    async with person(["head", *OFFERS], folder) as somebody:
        somebody.spare()
        somebody.edit(CONFIGURED, grace_seconds="120")
        steps = await bring_up(somebody)
        lines = table(("step", "seconds"), [(name, f"{seconds:.1f}") for name, seconds in steps])
        print(f"load average before: {load:.1f}", *lines, "", sep="\n", flush=True)
        async with client_of(somebody.url) as client:
            events = await Disturbed(somebody, client, clients, tokens).events(wanted)
        print("", *table(HEADINGS, [event.row for event in events]), sep="\n")
        print(*(f"\n{event.name}: {fault}" for event in events for fault in event.faults), sep="\n")
        outcomes = [dict(zip(HEADINGS, event.row, strict=True)) for event in events]
        return {"load": load, "steps": dict(steps), "events": outcomes}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=20, help="that stream at once")
    parser.add_argument("--tokens", type=int, default=100, help="of each output")
    parser.add_argument("--only", default="", metavar="WORDS", help="events whose names have these words")
    parser.add_argument("--json", type=Path, help="write all figures there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        found = asyncio.run(measure(given.clients, given.tokens, given.only, Path(folder)))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
