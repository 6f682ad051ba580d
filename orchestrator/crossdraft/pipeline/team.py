"""The services behind a pipeline: which there are, what they serve, and whether they go together."""

import asyncio
from collections.abc import Sequence

from crossdraft.pipeline.acquaintance import Acquaintance, Strange, all_tried
from crossdraft.pipeline.ports import Services
from crossdraft.pipeline.request import RequestError
from crossdraft.pipeline.resolution import Models
from crossdraft.pipeline.roster import Roster
from crossdraft.rpc.clients import DrafterClient, Patience, TargetClient
from crossdraft.rpc.errors import BadMessage, ServiceError, TimedOut
from crossdraft.rpc.security import ClientCredentials
from crossdraft.text.letters import Side
from crossdraft.text.pairing import Pair
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.vocabulary import Vocabulary
from crossdraft.verification.exchange import Description

OTHERS_SECONDS = 3.0  # from the beginning, for services that need not be there


class Team:
    """Clients of all addresses. A service that is down is asked again in the background until it is there.

    Args:
        targets: addresses, at least one.
        drafters: addresses.
        patience: of the clients.
        credentials: what the clients show and trust; None: plaintext.
    """

    def __init__(
        self,
        targets: Sequence[str],
        drafters: Sequence[str],
        patience: Patience,
        credentials: ClientCredentials | None = None,
    ) -> None:
        self.services = Services(Roster("target"), Roster("drafter"))
        self.models: Models | None = None  # once a target has described itself; with a drafter once one has
        self._addresses = (targets, drafters)
        self._patience = patience
        self._credentials = credentials
        self._clients: list[TargetClient | DrafterClient] = []
        self._targets: list[Acquaintance] = []
        self._drafters: list[Acquaintance] = []
        self.drafter_known = asyncio.Event()  # one has described itself
        self._known = asyncio.Event()  # the target is
        self._learning = (asyncio.Lock(), asyncio.Lock())  # one target, one drafter at a time

    async def gather(self, needs_drafter: bool = False) -> Models:
        """Returns when a target is known, and every other service was asked once or has had its time.

        Raises:
            ServiceError: no target is there, or no drafter and one is needed.
            RequestError: the targets serve models that differ.
        """
        loop = asyncio.get_running_loop()
        seconds = self._patience.describe_seconds
        until = loop.time() + (seconds if needs_drafter else min(seconds, OTHERS_SECONDS))
        for address in self._addresses[0]:
            target = TargetClient(address, self._patience, tls=self._credentials)
            self._clients.append(target)
            self._targets.append(Acquaintance(target, self._welcome_target))
        for address in self._addresses[1]:
            drafter = DrafterClient(address, self._patience, tls=self._credentials)
            self._clients.append(drafter)
            self._drafters.append(Acquaintance(drafter, self._welcome_drafter))
        models = await self._first_target()
        await all_tried([*self._targets, *self._drafters], until - loop.time())
        for one in self._targets:
            if one.strange is not None:
                raise RequestError(str(one.strange))
        if needs_drafter and not len(self.services.drafters):
            raise next((one.error for one in self._drafters if one.error), TimedOut("no drafter describes itself"))
        for one in (*self._targets, *self._drafters):
            one.warn()
        return self.models or models

    async def close(self) -> None:
        """Closes all clients, and with them their sessions."""
        for one in (*self._targets, *self._drafters):
            await one.close()
        for client in self._clients:
            await client.close()

    async def _first_target(self) -> Models:
        waiting = {one.tried for one in self._targets}
        while self.models is None:
            if not waiting:
                raise _none_of([one.error for one in self._targets if one.error is not None])
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return self.models

    async def _welcome_target(self, client: TargetClient, about: Description) -> None:
        async with self._learning[0]:
            if self.models is None:
                # In a thread: with vocabularies of 128,000 tokens this takes a second.
                self.models = Models(about, await asyncio.to_thread(_learned, about, Side.TARGET))
                self._known.set()
            known = self.models.target
            if about.fingerprint != known.fingerprint or about.context < known.context:
                raise Strange(
                    f"{client.service} serves {about.model!r} with {about.context} tokens of context, and another "
                    f"target {known.model!r} with {known.context}; all targets must serve the same model"
                )
            self.services.targets.add(client.address, client)

    async def _welcome_drafter(self, client: DrafterClient, about: Description) -> None:
        await self._known.wait()
        async with self._learning[1]:
            assert self.models is not None
            known = self.models.drafter
            if known is None:
                self.models = await asyncio.to_thread(_paired, self.models, about)
            elif _served(about) != _served(known):
                raise Strange(
                    f"it serves {about.model!r}, and another drafter {known.model!r} with other tokens or another "
                    "affinity matrix; all drafters must serve the same vocabulary"
                )
            self.services.drafters.add(client.address, client)
            self.drafter_known.set()


def _none_of(errors: Sequence[ServiceError]) -> ServiceError:
    """The only target's error, or one of the first one's kind that has the texts of all."""
    if len(errors) == 1:
        return errors[0]
    return type(errors[0])(f"none of {len(errors)} targets answered: {'; '.join(map(str, errors))}")


def _served(about: Description) -> tuple[str, str, bool]:
    """What all drafters must have in common."""
    return about.fingerprint, about.affinity, about.copies


def _paired(models: Models, drafter: Description) -> Models:
    vocabulary = _learned(drafter, Side.DRAFTER).vocabulary
    return Models(
        models.target, models.tokenization, drafter, Pair(models.tokenization.vocabulary, vocabulary)
    ).prepare()


def tokenization_of(description: Description, side: Side) -> Tokenization:
    """The tokenizer of a model that described itself.

    Raises:
        ValueError: there is none that could be used; the text says why.
    """
    vocabulary = Vocabulary.build(
        description.tokenizer_json, description.vocabulary_size, description.controls, description.stops, side
    )
    return Tokenization(description.tokenizer_json, vocabulary)


def _learned(description: Description, side: Side) -> Tokenization:
    """The same for a service that was asked: what it says may be anything. Raises BadMessage."""
    try:
        return tokenization_of(description, side)
    except ValueError as error:
        raise BadMessage(
            f"the tokenizer of the {side.name.lower()} {description.model!r} cannot be used: {error}"
        ) from error
