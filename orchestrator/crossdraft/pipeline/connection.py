"""The Python API: connect to targets and drafters, generate.

async with connect(target="127.0.0.1:7001", drafter="127.0.0.1:7002") as pipeline:
    async for token in pipeline.generate("def main(", method="seeded", seed=7):
        print(token.text, end="")
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

from crossdraft.pipeline.experience import Experience
from crossdraft.pipeline.generation import Generation
from crossdraft.pipeline.recorder import FileRecorder, Recorder
from crossdraft.pipeline.recording import Header
from crossdraft.pipeline.request import GenerationRequest, Overlap, Prompt, RequestError
from crossdraft.pipeline.resolution import Models, Secrets, resolve
from crossdraft.pipeline.team import Team, tokenization_of
from crossdraft.pipeline.trust import without_trust
from crossdraft.rpc.clients import Patience
from crossdraft.rpc.security import Shown, TlsFiles

__all__ = ["Pipeline", "connect", "tokenization_of"]

Addresses = str | Sequence[str]  # HOST:PORT, several of them with commas between, or a sequence


class Pipeline:
    """Connections to the targets of one model and, unless decoding is plain, to drafters of one vocabulary.

    Raises:
        ValueError: there is no address of a target, or TLS files cannot be used.
    """

    def __init__(
        self,
        target: Addresses,
        drafter: Addresses | None = None,
        patience: Patience | None = None,
        needs_drafter: bool = False,
        tls: TlsFiles | None = None,
        trusted: bool = True,
    ) -> None:
        self._targets = addresses_of(target)
        self._drafters = addresses_of(drafter or ())
        if not self._targets:
            raise ValueError("give at least one address of a target, such as 127.0.0.1:7001")
        self._patience = patience or Patience()
        self._needs_drafter = needs_drafter
        self._shown = None if tls is None else Shown(tls)
        self._trusted = trusted
        self._team: Team | None = None
        self._generations: WeakSet[Generation] = WeakSet()  # to close those that still run
        self._experience = Experience()

    async def __aenter__(self) -> Self:
        """Connect and learn the two vocabularies.

        Raises:
            ServiceError: no target answers in time, or its tokenizer cannot be used; the text says which one and
                what to do. The same of drafters where one is needed.
            RequestError: the targets serve models that differ.
        """
        team = Team(self._targets, self._drafters, self._patience, self._shown, self._trusted)
        try:
            await team.gather(self._needs_drafter)
        except BaseException:
            await team.close()
            raise
        self._team = team
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for generation in list(self._generations):
            await generation.aclose()
        await self._connected.close()

    def generate(self, prompt: Prompt, **settings: Any) -> Generation:
        """One output for a text, target ids or a Chat; `settings` are the other fields of GenerationRequest.

        Raises:
            RequestError: the request cannot be served by this pair.
        """
        return self.run(GenerationRequest(prompt, **settings))

    def run(self, request: GenerationRequest, watch: Recorder | None = None) -> Generation:
        """The same for a request that is made already; `watch`, such as a `watching.Watch`, is told its steps."""
        services, models, drawn = self._connected.services, self.models, Secrets.drawn()
        if not self._trusted and (self._drafters or models.drafter is not None):  # one may have come later
            request = without_trust(request)
        targets, before = len(services.targets), self._experience.of(request)
        follows = self._experience.led(request)
        assignment = resolve(request, models, drawn, targets, before, follows)
        member = self._experience.keep(request, assignment.governor)
        recorder = None
        if request.record is not None:
            asked = replace(request, record=None)
            header = Header(
                _software(), time.time(), asked, models.target, models.drafter, drawn, targets, before, follows
            )
            recorder = partial(_recorder, header, request.record)
        k = request.k if request.overlap is Overlap.OFF else 0
        generation = Generation(assignment, services, k, recorder, watch, member)
        if member is not None:
            member.attach(generation)
        self._generations.add(generation)
        return generation

    async def follow(self, target: Addresses, drafter: Addresses | None = None) -> None:
        """From now on these are the services; sessions that run elsewhere go on there, and no new one is opened."""
        await self._connected.follow(addresses_of(target), addresses_of(drafter or ()))

    async def drafter_known(self) -> None:
        """Returns once a drafter has said what it is; generations that begin from then on can use it."""
        await self._connected.drafter_known.wait()

    @property
    def target_there(self) -> bool:
        """Whether a target can be reached, as far as that is known: connections are watched all the time."""
        return self._connected.target_there

    @property
    def models(self) -> Models:
        """The vocabularies of the pair, once connected; with a drafter once one has answered."""
        models = self._connected.models
        assert models is not None  # it is, before `gather` returns
        return models

    @property
    def _connected(self) -> Team:
        if self._team is None:
            raise RuntimeError("use the pipeline inside `async with connect(...)`")
        return self._team


def connect(
    target: Addresses,
    drafter: Addresses | None = None,
    patience: Patience | None = None,
    *,
    needs_drafter: bool = False,
    tls: TlsFiles | None = None,
    trusted: bool = True,
) -> Pipeline:
    """A pipeline to use with `async with`.

    Args:
        target: one address or several, all of the same model; one must be there, others may come later.
        drafter: likewise of one vocabulary. None: plain decoding, as it is until a drafter has answered.
        patience: how long services may take to answer.
        needs_drafter: to connect fails, as for a target, if no drafter answers.
        tls: what this side shows to services, and whose certificates it takes; None: plaintext.
        trusted: whether the drafters are; with one that is not, only methods whose output does not depend on what a
            drafter says of its laws are used (`slem`, `seeded`), and others are refused.

    Raises:
        ValueError: there is no address of a target, or TLS files cannot be used (`TlsError`).
    """
    return Pipeline(target, drafter, patience, needs_drafter, tls, trusted)


def addresses_of(given: Addresses) -> tuple[str, ...]:
    """Each once, in their order."""
    separate = given.split(",") if isinstance(given, str) else given
    return tuple(dict.fromkeys(address.strip() for address in separate if address.strip()))


def _software() -> str:
    try:
        return version("crossdraft")
    except PackageNotFoundError:
        return "not installed"


def _recorder(header: Header, path: Path) -> FileRecorder:
    """Raises RequestError if the file cannot be made."""
    try:
        return FileRecorder(path, header)
    except OSError as error:
        raise RequestError(f"cannot record: {error}; name a file that can be written (--record)") from error
