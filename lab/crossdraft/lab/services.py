"""Services that a benchmark starts, puts at a distance, and kills."""

import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from crossdraft.cli.processes import Running, Wanted, running
from crossdraft.cli.running import CommandFailed, UsageError, checked_options
from crossdraft.config.engine import STARTED, EngineOptions
from crossdraft.lab.emulation import EmulatedHost, network
from crossdraft.lab.emulation.steps import Pace
from crossdraft.lab.harness import numbers_of, on_core

# Of a target that is measured: its requests get what they ask for, and nothing of the model's own.
NO_DEFAULTS = ("--generation-config", "vllm")
LONGEST_DELAY = 60_000  # ms of a message on an emulated network
FIRST_PORT, LAST_PORT = 20_000, 30_000  # below those that outgoing connections get


@dataclass(frozen=True)
class Served:
    """A model as a service, perhaps slower or worse than it is.

    Raises:
        UsageError: the pace or the noise is out of its range.
    """

    model: str
    pace: str | None = None  # A,B in ms, as --pace has it; None: as fast as it is
    logit_noise: float = 0.0  # of a drafter
    engine: EngineOptions = STARTED

    def __post_init__(self) -> None:
        with checked_options():
            if self.pace is not None:
                Pace.parsed(self.pace)
        if not 0 <= self.logit_noise < float("inf"):
            raise UsageError(f"--logit-noise must be 0 or more, got {self.logit_noise:g}")

    @property
    def options(self) -> tuple[str, ...]:
        """Of its command."""
        pace = () if self.pace is None else ("--pace", self.pace)
        noise = ("--logit-noise", str(self.logit_noise)) if self.logit_noise else ()
        return (*self.engine.arguments, *pace, *noise)


def delays_of(text: str) -> tuple[float, ...]:
    """Milliseconds with commas between; raises UsageError if the emulated network cannot have them."""
    return numbers_of("--delay-ms", text, 0, LONGEST_DELAY)


# A core for each model, the drafter at a distance.


@dataclass(frozen=True)
class Distant:
    """A service at the far end of a link."""

    address: str
    process_id: int
    link: EmulatedHost | None  # None: on loopback

    async def delay(self, milliseconds: float) -> None:
        """Sets the time of a message to it, and of one back."""
        if self.link is not None:
            await self.link.delay(milliseconds)


@asynccontextmanager
async def service(role: str, served: Served, core: int | None, distant: bool) -> AsyncIterator[Distant]:
    """A target or drafter on a core or all of them, on a host with a link of its own if it is distant; raises
    CommandFailed."""
    async with AsyncExitStack() as stack:
        link, prefix = None, () if core is None else on_core(core)
        options = (*(NO_DEFAULTS if role == "target" else ()), *served.options)
        if distant:
            link = (await stack.enter_async_context(network([role])))[role]
            prefix = (*link.place.prefix, *prefix)
            options = (*options, "--host", link.place.listen)
        (found,) = await stack.enter_async_context(running([Wanted(role, served.model, 1, options, prefix)]))
        address = found.address if link is None else await link.address_through(found.address)
        yield Distant(address, found.process_id, link)


@dataclass(frozen=True)
class Killable:
    """A service that can be killed, and comes back on its port."""

    wanted: Wanted
    address: str
    stack: AsyncExitStack
    running: Running

    @staticmethod
    async def started(wanted: Wanted, stack: AsyncExitStack) -> "Killable":
        """Starts it; raises CommandFailed."""
        wanted = replace(wanted, more=(*wanted.more, "--port", str(_free_port())))
        (found,) = await stack.enter_async_context(running([wanted]))
        return Killable(wanted, found.address, stack, found)

    def kill(self) -> float:
        """By SIGKILL; returns when, in seconds of the monotonic clock."""
        os.kill(self.running.process_id, signal.SIGKILL)
        return time.monotonic()

    async def restarted(self) -> "Killable":
        """The same, started again; raises CommandFailed."""
        (found,) = await self.stack.enter_async_context(running([self.wanted]))
        return replace(self, running=found)


def _free_port() -> int:
    """One that nobody listens on, and that no outgoing connection takes while its service is away."""
    for port in random.sample(range(FIRST_PORT, LAST_PORT), 100):
        with socket.socket() as bound:
            try:
                bound.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise CommandFailed(f"all ports tried between {FIRST_PORT} and {LAST_PORT} are taken")
