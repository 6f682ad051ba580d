"""The figures of BENCHMARKS.md about clusters: `python -m tests.clusters.figures`, in a checkout, as root.

Four machines: a head, two for targets and orchestrators, one for drafters. Commands are those of README.md. What
happens to seeded streams when something is lost or changed is measured by their clients.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from openai import AsyncOpenAI

from crossdraft.emulation import Machine
from tests.clusters.person import CONFIGURATION, FILE, Person, person
from tests.clusters.streams import Stream, Streams, client_of, faults_of, first_piece

OFFERS = {
    "target-1": '{"target": 1, "orchestrator": 8}',
    "target-2": '{"target": 1, "orchestrator": 8}',
    "drafters": '{"drafter": 2}',
}
AFTER = 12.0  # seconds that clients go on after an event
HEADINGS = ("what happens", "outputs", "broken", "texts that differ", "longest pause of an output: median", "worst")


@dataclass(frozen=True)
class Event:
    """What became of the streams."""

    name: str
    streams: tuple[Stream, ...]
    faults: tuple[str, ...]
    at: float  # seconds of the monotonic clock

    @property
    def row(self) -> tuple[str, ...]:
        """Of a table."""
        pauses = [pause for one in self.streams if (pause := one.pause(self.at)) is not None] or [0.0]
        broken = sum(bool(one.fault) for one in self.streams)
        counts = (len(self.streams), broken, len(self.faults) - broken)
        return (self.name, *map(str, counts), f"{median(pauses):.2f} s", f"{max(pauses):.2f} s")


class Figures:
    """One cluster, and what is done to it while clients ask for outputs."""

    def __init__(self, somebody: Person, client: AsyncOpenAI, clients: int, tokens: int) -> None:
        self._person = somebody
        self._client = client
        self._seeds = range(1, clients + 1)
        self._tokens = tokens
        self._undisturbed: list[Stream] = []

    async def events(self) -> list[Event]:
        """All of them, one after the other."""
        machines = self._person.machines
        return [
            await self._quiet(),
            await self._event("an orchestrator's process is killed", self._kill_orchestrator),
            await self._event(
                "configuration: orchestrators change", lambda: self._update("outputs: 64", "outputs: 65")
            ),
            await self._event(
                "configuration: targets change",
                lambda: self._update("threads: 1\n      resources: {cpus: 0.5, custom: {target", TARGET_CHANGED),
            ),
            await self._event("the link of the drafters' machine is cut", machines["drafters"].link.cut),
            await self._event("a target's machine is switched off", machines["target-1"].switch_off),
        ]

    async def _quiet(self) -> Event:
        """Each output once, to compare others with."""
        streams = Streams(self._client, self._seeds, self._tokens)
        running = asyncio.create_task(streams.run())
        await streams.under_way()
        at = time.monotonic()
        self._undisturbed = await running
        faults = faults_of(self._undisturbed, self._undisturbed)
        return Event("nothing", tuple(self._undisturbed), tuple(faults), at)

    async def _event(self, name: str, happen: Callable[[], Awaitable[None]]) -> Event:
        streams, over = Streams(self._client, self._seeds, self._tokens), asyncio.Event()
        running = asyncio.create_task(streams.keep_on(over))
        await streams.under_way()
        at = time.monotonic()
        await happen()
        took = time.monotonic() - at
        await asyncio.sleep(AFTER)
        over.set()
        ended = await running
        name = f"{name} ({took:.0f} s)" if took > 1 else name
        event = Event(name, tuple(ended), tuple(faults_of(ended, self._undisturbed)), at)
        print(*event.row, *event.faults[:3], sep=" | ", flush=True)
        return event

    async def _update(self, old: str, new: str) -> None:
        """As README.md says."""
        await update(self._person, old, new)

    async def _kill_orchestrator(self) -> None:
        found = json_of(await self._person.exec("crossdraft status --json"))
        one = next(process for process in found["processes"] if process["role"] == "orchestrator")
        machine = next(machine for machine in self._person.machines.values() if machine.address == one["node"])
        await said(machine, f"kill -9 {one['process']}")


TARGET_CHANGED = "threads: 1\n      cache_mib: 384\n      resources: {cpus: 0.5, custom: {target"


async def update(somebody: Person, old: str, new: str) -> None:
    """Changes the configuration and deploys it again."""
    somebody.replace("deploy/crossdraft.yaml", old, new)
    await somebody.ray("rsync-up", FILE)
    await somebody.exec(f"crossdraft deploy {CONFIGURATION}", seconds=400.0)


def json_of(output: str) -> dict[str, Any]:
    """The object among the lines that a command has written."""
    found: dict[str, Any] = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return found


async def said(machine: Machine, command: str) -> str:
    """What a command on a machine writes."""
    process = await asyncio.create_subprocess_exec(*machine.ssh(command), stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return output.decode().strip()


async def bring_up(somebody: Person) -> list[tuple[str, float]]:
    """From a checkout to the first token; what each step took, seconds."""
    for name, offer in OFFERS.items():
        machine = somebody.machines[name]
        await said(machine, f"mkdir -p ~/crossdraft && echo '{offer}' > ~/crossdraft/offers.json")
    began = time.monotonic()
    await somebody.make_wheel()
    await somebody.ray("get-auth-token", "--generate")
    await somebody.ray("up", "--yes", FILE)
    await timed(somebody, "until all machines are nodes", somebody.all_alive(300.0))
    await somebody.exec(f"crossdraft deploy {CONFIGURATION}", seconds=400.0)
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


async def measure(clients: int, tokens: int, folder: Path) -> dict[str, object]:
    """Prints the tables; returns what they say."""
    async with person(["head", *OFFERS], folder) as somebody:
        somebody.spare()
        steps = await bring_up(somebody)
        lines = table(("step", "seconds"), [(name, f"{seconds:.1f}") for name, seconds in steps])
        print(*lines, "", sep="\n", flush=True)
        async with client_of(somebody.url) as client:
            events = await Figures(somebody, client, clients, tokens).events()
        print(*table(HEADINGS, [event.row for event in events]), sep="\n")
        print(*(f"\n{event.name}: {fault}" for event in events for fault in event.faults), sep="\n")
        outcomes = [dict(zip(HEADINGS, event.row, strict=True)) for event in events]
        return {"steps": dict(steps), "events": outcomes}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=20, help="that stream at once")
    parser.add_argument("--tokens", type=int, default=100, help="of each output")
    parser.add_argument("--json", type=Path, help="write all figures there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        found = asyncio.run(measure(given.clients, given.tokens, Path(folder)))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
