"""Services that a benchmark starts: a core for each model, the drafter at a distance."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from crossdraft.cli.processes import Wanted, running
from crossdraft.cli.running import checked_options
from crossdraft.config.engine import STARTED, EngineOptions
from crossdraft.lab.emulation.network import EmulatedHost, network
from crossdraft.lab.emulation.steps import Emulation

# Of a target that is measured: its requests get what they ask for, and nothing of the model's own.
NO_DEFAULTS = ("--generation-config", "vllm")


@dataclass(frozen=True)
class Served:
    """A model as a service, perhaps slower or worse than it is. Raises UsageError: the pace or the noise is out of its
    range."""

    model: str
    pace: str | None = None  # A,B in ms, as --pace has it; None: as fast as it is
    logit_noise: float = 0.0  # of a drafter
    engine: EngineOptions = STARTED

    def __post_init__(self) -> None:
        with checked_options():
            Emulation.parsed(self.pace, self.logit_noise)

    @property
    def options(self) -> tuple[str, ...]:
        """Of its command."""
        pace = () if self.pace is None else ("--pace", self.pace)
        noise = ("--logit-noise", str(self.logit_noise)) if self.logit_noise else ()
        return (*self.engine.arguments, *pace, *noise)


@dataclass(frozen=True)
class Distant:
    """A service at the far end of a link."""

    address: str
    link: EmulatedHost | None  # None: on loopback

    async def delay(self, milliseconds: float) -> None:
        """Sets the time of a message to it, and of one back."""
        if self.link is not None:
            await self.link.delay(milliseconds)


@asynccontextmanager
async def service(role: str, served: Served, core: int, distant: bool) -> AsyncIterator[Distant]:
    """A target or drafter on a core, on a host with a link of its own if it is distant; raises
    CommandFailed."""
    async with AsyncExitStack() as stack:
        link, prefix = None, on_core(core)
        options = (*(NO_DEFAULTS if role == "target" else ()), *served.options)
        if distant:
            link = (await stack.enter_async_context(network([role])))[role]
            prefix = (*link.place.prefix, *prefix)
            options = (*options, "--host", link.place.listen)
        (found,) = await stack.enter_async_context(running([Wanted(role, served.model, 1, options, prefix)]))
        address = found.address if link is None else await link.address_through(found.address)
        yield Distant(address, link)


def on_core(number: int) -> tuple[str, ...]:
    """What a command is run by so that it has one core to itself; nothing where there is no taskset (util-linux)."""
    cores = sorted(os.sched_getaffinity(0))
    return () if shutil.which("taskset") is None else ("taskset", "-c", str(cores[number % len(cores)]))
