"""Services of a benchmark: a core for each model, the drafter at a distance."""

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from crossdraft.cli.failures import Misused
from crossdraft.cli.processes import Running, Wanted, running
from crossdraft.cli.running import checked_options
from crossdraft.emulation import Link, network
from crossdraft.models.pacing import Pace

LONGEST_DELAY = 60_000  # ms of a message on an emulated network


@dataclass(frozen=True)
class Served:
    """A model as a service, perhaps unlike itself.

    Raises:
        Misused: it cannot be paced so, or its logits disturbed so.
    """

    model: str
    pace: str | None = None  # A,B in ms, as --pace has it; None: as fast as it is
    logit_noise: float = 0.0  # of a drafter

    def __post_init__(self) -> None:
        with checked_options():
            if self.pace is not None:
                Pace.parsed(self.pace)
        if not 0 <= self.logit_noise < float("inf"):
            raise Misused(f"--logit-noise must be 0 or more, got {self.logit_noise:g}")

    @property
    def options(self) -> tuple[str, ...]:
        """Of its command."""
        pace = () if self.pace is None else ("--pace", self.pace)
        return (*pace, *(("--logit-noise", str(self.logit_noise)) if self.logit_noise else ()))


def on_core(number: int) -> tuple[str, ...]:
    """What a command is run by so that it has one core to itself; nothing where there is no taskset (util-linux)."""
    cores = sorted(os.sched_getaffinity(0))
    return () if shutil.which("taskset") is None else ("taskset", "-c", str(cores[number % len(cores)]))


@asynccontextmanager
async def target_service(target: Served) -> AsyncIterator[Running]:
    """A target on loopback, on the first core; raises CommandFailed."""
    async with running([Wanted("target", target.model, 1, target.options, on_core(0))]) as (found,):
        yield found


@dataclass(frozen=True)
class Distant:
    """A service at the far end of a link."""

    address: str
    process_id: int
    link: Link | None  # None: on loopback

    async def delay(self, milliseconds: float) -> None:
        """Sets the time of a message to it, and of one back."""
        if self.link is not None:
            await self.link.delay(milliseconds)


def drafter_service(drafter: Served, distant: bool) -> AbstractAsyncContextManager[Distant]:
    """A drafter on the second core, on a host with a link of its own if it is distant; raises CommandFailed."""
    return service("drafter", drafter, 1, distant)


@asynccontextmanager
async def service(role: str, served: Served, core: int, distant: bool) -> AsyncIterator[Distant]:
    """A target or drafter on a core, on a host with a link of its own if it is distant; raises CommandFailed."""
    async with AsyncExitStack() as stack:
        link, prefix, options = None, on_core(core), served.options
        if distant:
            link = (await stack.enter_async_context(network([role])))[role]
            prefix = (*link.place.prefix, *prefix)
            options = (*options, "--host", link.place.listen)
        (found,) = await stack.enter_async_context(running([Wanted(role, served.model, 1, options, prefix)]))
        address = found.address if link is None else await link.address_through(found.address)
        yield Distant(address, found.process_id, link)
