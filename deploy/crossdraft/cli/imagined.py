"""Services of a made-up language, as processes: real servers and messages without models.

    python -m crossdraft.cli.imagined target|drafter METHOD SIZE MILLISECONDS

They answer one method's sessions, with rows of 64 ids over vocabularies of SIZE; a pass, or a proposal, takes so
many milliseconds, which are slept.
"""

import asyncio
import sys
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass, field
from threading import Thread

import numpy as np

from crossdraft.cli.imagined_target import WIDTH, TargetService, World
from crossdraft.cli.in_memory import Guesser
from crossdraft.cli.processes import Wanted
from crossdraft.cli.serve import end_with_stdin
from crossdraft.drafter.conversation import Conversation, Reply, Request, Send
from crossdraft.drafter.epochs import Epoch
from crossdraft.drafter.packing import Packing
from crossdraft.rpc.errors import ProtocolBroken
from crossdraft.rpc.handlers import DRAFTER, TARGET
from crossdraft.rpc.server import Listening, Server, run, serve
from crossdraft.text.letters import NOTHING, Letters, Side
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.exchange import (
    Branch,
    Description,
    NoiseKey,
    OpenDrafter,
    Score,
    Scored,
)
from crossdraft.verification.methods import Method, method_named
from crossdraft.verification.rows import Proposal


@dataclass(frozen=True)
class Imagined(Wanted):
    """One of them, to be started."""

    method: str = "slem"
    size: int = 128_000  # ids of each vocabulary
    milliseconds: float = 0.0

    def command(self) -> list[str]:
        """As it would be typed."""
        numbers = [self.method, str(self.size), str(self.milliseconds)]
        return [*self.prefix, sys.executable, "-m", "crossdraft.cli.imagined", self.role, *numbers]


@dataclass(frozen=True, eq=False)
class DrafterService:
    """A drafter."""

    world: World
    description: Description

    async def open(self, request: OpenDrafter) -> "DrafterSession":
        """A new session."""
        world, chooser = self.world, RandomChooser(np.random.default_rng(0))
        guesser = Guesser(world.language, world.noises, world.method, WIDTH, NoiseKey(0), chooser)
        return DrafterSession(guesser, world.seconds)

    async def close(self) -> None:
        """Nothing runs."""


@dataclass(eq=False)
class DrafterSession:
    """One output that is guessed ahead of."""

    guesser: Guesser
    seconds: float
    text: Letters = NOTHING
    branches: dict[int, tuple[Proposal, ...]] = field(default_factory=dict)  # those of the epoch, by number
    count: int = 0  # branches of the session
    packing: Packing = field(init=False)
    growing: "deque[tuple[int, Branch]]" = field(init=False)  # with the number of proposals at which each is finished

    def converse(self, requests: AsyncIterator[Request]) -> AsyncGenerator[Reply, None]:
        """Proposals, one after the other, and prepared continuations."""
        return Conversation(self).replies(requests)

    async def close(self) -> None:
        """Nothing is held."""

    def begin(self, epoch: Epoch) -> None:
        """As in `conversation.Drafter`."""
        request = epoch.request
        self.text = Letters(self.text[: request.offset] + request.letters)
        self.packing, self.growing = Packing(epoch), deque()
        adopted, self.branches = self.branches.get(request.adopt, ()), {}
        for proposal in adopted:
            self._propose(proposal)
        if adopted and not self.guesser.method.drafter_rows:  # the other side has them
            epoch.sent = len(adopted)
            self.packing = Packing(epoch)

    async def draft(self, epoch: Epoch, send: Send) -> None:
        """As in `conversation.Drafter`."""
        self.packing.resume()
        while epoch.wanted:
            if self.packing.made < epoch.count:
                await asyncio.sleep(self.seconds)
                self._step(epoch)
            for reply in self.packing.due():
                send(reply)

    async def score(self, epoch: Epoch, request: Score) -> Scored:
        """There is no model."""
        raise ProtocolBroken("an imagined drafter has no scores")

    def _step(self, epoch: Epoch) -> None:
        """One more proposal; its branches are finished so many steps later as they have proposals."""
        before, proposal = self.text, self.guesser.proposal(self.text)
        for branch in self._prepared(epoch, before, proposal):
            self.growing.append((self.packing.made + epoch.request.branch_depth, branch))
        self._propose(proposal)
        while self.growing and self.growing[0][0] <= self.packing.made:
            self.packing.prepare(self.growing.popleft()[1])

    def _propose(self, proposal: Proposal) -> None:
        self.text = Letters(self.text + self.guesser.letters_of(proposal))
        self.packing.propose(proposal)

    def _prepared(self, epoch: Epoch, text: Letters, drawn: Proposal) -> Iterator[Branch]:
        depth, width = epoch.request.branch_depth, epoch.request.branch_width
        if not depth:
            return
        row = self.guesser.row(text)
        for token in [int(one) for one in row.ids if one != drawn.token][:width]:
            letters = self.guesser.letters_of(Proposal(token, None, drawn.whose))
            after, proposals = Letters(text + letters), []
            for _ in range(depth):
                proposals.append(self.guesser.proposal(after))
                after = Letters(after + self.guesser.letters_of(proposals[-1]))
            self.count += 1
            self.branches[self.count] = tuple(proposals)
            yield Branch(self.count, len(text), letters, tuple(one.token for one in proposals))


async def _main(role: str, method: Method, size: int, milliseconds: float) -> None:
    world = World.of(method, size, milliseconds / 1000)
    if role == "target":
        await serve(Server(TARGET, TargetService(world, world.description(Side.TARGET)), Listening(grace_seconds=0)))
    else:
        side = Side.TARGET if method.same_vocabulary else Side.DRAFTER
        await serve(Server(DRAFTER, DrafterService(world, world.description(side)), Listening(grace_seconds=0)))


if __name__ == "__main__":
    Thread(target=end_with_stdin, daemon=True).start()
    run(_main(sys.argv[1], method_named(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
