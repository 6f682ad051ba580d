"""What is done to a cluster while clients stream from it, and what becomes of their streams."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from openai import AsyncOpenAI

from tests.cluster.machines.machines import Machine
from tests.cluster.machines.person import CONFIGURATION, FILE, NEXT, VERSION, Person, said
from tests.cluster.machines.streams import REPEATS, Stream, Streams, faults_of

AFTER = 20.0  # seconds that clients go on after an event: by then Ray knows of a machine that is lost
RESTORED_SECONDS = 180.0
HEADINGS = ("what happens", "outputs", "broken", "texts that differ", "pause, median", "longest", "of later outputs")
CONFIGURED = "deploy/serve.yaml"
TARGET = "threads: 1\n        resources: {cpus: 0.5, custom: {target"
Happening = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Event:
    """What became of the streams."""

    name: str
    at: float  # seconds of the monotonic clock
    took: float  # seconds until it had happened
    streams: tuple[Stream, ...]
    faults: tuple[str, ...]

    @property
    def row(self) -> tuple[str, ...]:
        """Of a table. A pause is the longest time that a client waited for a piece that came after the event began."""
        under_way = [one for one in self.streams if one.times and one.times[0] <= self.at]
        later = [one for one in self.streams if one not in under_way]
        pauses = _pauses(under_way, self.at)
        broken = sum(bool(one.fault) for one in self.streams)
        counts = (len(self.streams), broken, len(self.faults) - broken)
        name = f"{self.name} ({self.took:.0f} s)" if self.took > 1 else self.name
        times = (median(pauses), max(pauses), *([max(_pauses(later, self.at))] if later else []))
        written = [f"{seconds:.2f} s" for seconds in times]
        return (name, *map(str, counts), *written, *([] if later else [""]))


class Disturbed:
    """One cluster, and what happens to it while clients ask for outputs."""

    def __init__(self, somebody: Person, client: AsyncOpenAI, clients: int, tokens: int) -> None:
        self._person = somebody
        self._client = client
        self._seeds = range(1, clients + 1)
        self._tokens = tokens
        self._undisturbed: list[Stream] = []
        self._whole: Counter[str] = Counter()  # processes by role, when nothing is missing

    async def events(self, wanted: str = "") -> list[Event]:
        """All of them whose names have `wanted`, one after the other."""
        self._whole = await roles(self._person)
        found = [await self._quiet()]
        print(*found[0].row, sep=" | ", flush=True)
        async for name, happen in self._happenings():
            if wanted not in name:
                continue
            found.append(await self._event(name, happen))
            print(*found[-1].row, *found[-1].faults[:3], sep=" | ", flush=True)
        return found

    async def _happenings(self) -> AsyncIterator[tuple[str, Happening]]:
        """Each is made good before the next one. Hosts that are lost: `host_losses`."""
        machines = self._person.machines
        yield "one of two orchestrators is killed", await self._killing()
        await self._restored()
        beside = self._at((await processes(self._person))["orchestrator"][0])
        away = [machine for name, machine in machines.items() if name.startswith("drafter")]
        yield "the link between an orchestrator and all drafters is cut", lambda: beside.part(*away)
        await beside.join(*away)
        await self._restored()
        one, other = machines["target-1"], machines["target-2"]
        yield "the link between an orchestrator and the other machine's target is cut", lambda: one.part(other)
        await one.join(other)
        await self._restored()
        yield "rolling update: options of targets and orchestrators change", self._update
        await self._restored()
        yield "upgrade: another version, all processes are replaced", self._upgrade

    async def _quiet(self) -> Event:
        """Each output once, to compare others with."""
        streams = Streams(self._client, self._seeds, self._tokens)
        running = asyncio.create_task(streams.run())
        await streams.under_way()
        at = time.monotonic()
        self._undisturbed = await running
        faults = faults_of(self._undisturbed, self._undisturbed)
        return Event("nothing", at, 0.0, tuple(self._undisturbed), tuple(faults))

    async def _event(self, name: str, happen: Happening) -> Event:
        streams, over = Streams(self._client, self._seeds, self._tokens, REPEATS), asyncio.Event()
        running = asyncio.create_task(streams.keep_on(over))
        await streams.under_way()
        at = time.monotonic()
        await happen()
        took = time.monotonic() - at
        await asyncio.sleep(AFTER)
        over.set()
        ended = await running
        return Event(name, at, took, tuple(ended), tuple(faults_of(ended, self._undisturbed)))

    async def _killing(self) -> Happening:
        """How one of the orchestrators is killed."""
        found = json_of(await self._person.exec("crossdraft status --json"))
        one = next(process for process in found["processes"] if process["role"] == "orchestrator")
        return lambda: said(self._at(one["node"]), f"kill -9 {one['process']}")

    def _at(self, address: str) -> Machine:
        (machine,) = (machine for machine in self._person.machines.values() if machine.address == address)
        return machine

    async def _restored(self) -> None:
        """Returns once all that there was before is there."""
        until = time.monotonic() + RESTORED_SECONDS
        while True:
            found = await roles(self._person)
            if found == self._whole:
                return
            assert time.monotonic() < until, f"there is {dict(found)}, and was {dict(self._whole)}"
            await asyncio.sleep(1.0)

    async def _update(self) -> None:
        somebody = self._person
        somebody.replace(CONFIGURED, "max_outputs: 64", "max_outputs: 65")
        somebody.replace(CONFIGURED, TARGET, TARGET.replace("threads: 1\n", "threads: 1\n        cache_mib: 384\n"))
        await somebody.ray("rsync-up", FILE)
        await deploy(somebody)

    async def _upgrade(self) -> None:
        somebody = self._person
        await somebody.make_wheel(somebody.changed_sources())
        somebody.replace(FILE, f"crossdraft-{VERSION}", f"crossdraft-{NEXT}")
        await somebody.ray("up", "--yes", "--no-restart", FILE)
        await deploy(somebody)


async def deploy(somebody: Person) -> None:
    """As docs/cluster.md says."""
    await somebody.exec(f"crossdraft deploy {CONFIGURATION}", seconds=1200.0)


async def processes(somebody: Person) -> dict[str, list[str]]:
    """The nodes of all processes that the directory names, by role."""
    found: dict[str, list[str]] = {}
    for one in json_of(await somebody.exec("crossdraft status --json"))["processes"]:
        found.setdefault(one["role"], []).append(one["node"])
    return found


async def roles(somebody: Person) -> Counter[str]:
    """How many processes of each kind there are."""
    return Counter({role: len(nodes) for role, nodes in (await processes(somebody)).items()})


def json_of(output: str) -> dict[str, Any]:
    """The object among the lines that a command has written."""
    found: dict[str, Any] = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return found


def _pauses(streams: Sequence[Stream], at: float) -> list[float]:
    return [pause for one in streams if (pause := one.pause(at)) is not None] or [0.0]
