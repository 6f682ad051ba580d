"""Discovery: which services there are behind a pipeline, what they serve, and whether they can be used together.

Every service is asked to describe itself until it has; those that are down are asked in the background. The connections
of those that have answered are watched, so that it is known at any time whether they can be reached.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from crossdraft.client.roster import Roster, Services
from crossdraft.rpc.errors import REPLACED, BadMessage, Replaced, ServiceError, TimedOut, Unreachable, name_of
from crossdraft.rpc.links import DrafterClient, Patience, ServiceClient, TargetClient
from crossdraft.rpc.security import RenewedCredentials
from crossdraft.session.models import Models, tokenization_of
from crossdraft.text.letters import Side
from crossdraft.text.tokenization import Tokenization
from crossdraft.types.messages import Description
from crossdraft.types.request import RequestError

log = logging.getLogger(__name__)

OTHERS_SECONDS = 3.0  # from the beginning, for services that are not needed to begin
FIRST_PAUSE = 0.25  # seconds between two attempts to reach a service; it doubles
MAX_PAUSE = 4.0
WATCHED_EVERY = 0.25  # seconds between two looks at the connection to a known service


class MismatchError(Exception):
    """A service that describes itself, but cannot be used while others of its role are there; the text says why."""


Client = TargetClient | DrafterClient
Welcome = Callable[[Any, Description], Awaitable[None]]


@dataclass(eq=False)
class Probe:
    """Asks one service to describe itself, then watches its connection; and again where it may be another service.

    Create it in a running event loop.
    """

    client: Client
    # Called with it and its description until it raises neither ServiceError, as the service cannot be used now, nor
    # MismatchError.
    welcome: Welcome
    # Told of a service that was welcomed before it is described again, and of one that is gone, with why.
    parted: Callable[[str, str], None] = lambda _, __: None

    def __post_init__(self) -> None:
        self.error: ServiceError | None = None  # the latest, while it is not known
        self.mismatch: MismatchError | None = None
        self.reachable = False  # it is known, and could be reached when that was last checked
        self.tried: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # after the first attempt
        self._warned = False
        self._lost = False  # it was reachable once
        self._wanted = asyncio.Event()  # ends the pause between two attempts
        self._task = asyncio.create_task(self._meet(), context=Context())  # it is not of the request that began it

    @property
    def fault(self) -> str:
        """Why it is not used now, without its address; empty if it is used."""
        if self.reachable:
            return ""
        if self.mismatch is not None:
            return f"not used: {str(self.mismatch).removeprefix(f'{self.client.service} ')}"
        if isinstance(self.error, BadMessage):
            return f"not used: {self.error}"
        why = "" if self.error is None else f" ({name_of(self.error).replace('_', ' ')})"
        return f"{'lost' if self._lost else 'not there yet'}{why}; tried again"

    def warn(self, why: str = "") -> None:
        self._warned = bool(why) or self.error is not None or not self.tried.done()
        if self._warned:
            log.warning("%s; it is tried again", why or self.error or f"{self.client.service} has not answered yet")

    @property
    def lives(self) -> bool:
        """Whether its process is known to run, so that it will answer."""
        return self.client.patience.lives(self.client.address)

    def retry(self) -> None:
        """Ask at once a service that has not described itself, or cannot be used; `tried` is of that attempt."""
        if self.tried.done() and (self.error is not None or self.mismatch is not None):
            self.tried = asyncio.get_running_loop().create_future()
            self._wanted.set()

    def stop(self) -> None:
        """Ask and watch no more; the client's sessions go on."""
        self._task.cancel()
        self._tried()

    async def close(self) -> None:
        self.stop()
        await asyncio.wait([self._task])
        await self.client.close()

    async def _meet(self) -> NoReturn:
        client = self.client
        try:
            while True:
                pause = FIRST_PAUSE
                while not await self._asked():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._wanted.wait(), pause)
                        client.connect()  # gRPC tries no connection again at once
                    self._wanted.clear()
                    pause = min(2 * pause, MAX_PAUSE)
                self._tried()
                await self._watch(client)
                # Until its description is known nothing that was made for another may be sent there.
                self.parted(client.address, f"{client.service} is described anew")
        finally:
            self._tried()

    async def _watch(self, client: Client) -> None:
        """Return when another service may be there: the connection is back, or the service has refused a session.

        Sessions find out by themselves whether one that was lost is back; where it is for long, another may replace it.
        """
        loop, patience = asyncio.get_running_loop(), client.patience.target_seconds
        self.reachable, since = True, loop.time()  # seconds: when it was reachable last
        lost = False  # also if it can be reached again when that is checked next
        while not client.outdated:
            reachable = client.reachable()
            if reachable and lost:
                break
            lost = not reachable
            if reachable:
                since = loop.time()
            elif self.reachable and reachable is None:
                pass  # it connects
            elif self.reachable:
                self.reachable, self._lost = False, True
                self.warn(f"{client.service} cannot be reached any more")
            elif loop.time() - since > patience:
                self.parted(client.address, f"{client.service} cannot be reached any more")
            await asyncio.sleep(WATCHED_EVERY)
        self.reachable = False

    async def _asked(self) -> bool:
        """Ask once; whether there is nothing more to ask."""
        client = self.client
        try:
            await self.welcome(client, await client.describe())
            self.error = self.mismatch = None
            if self._warned:
                log.warning("%s is there now", client.service)
            self._warned = False
        except MismatchError as error:
            if self.mismatch is None:
                log.warning("%s is not used: %s", client.service, error)
            self.mismatch = error
            self._tried()
            return False
        except ServiceError as error:
            self.error, self.mismatch = error, None
            if not self.lives:
                self._tried()
            return False
        return True

    def _tried(self) -> None:
        if not self.tried.done():
            self.tried.set_result(None)


Members = dict[str, Probe]  # of one role, by address


@dataclass(eq=False)
class Discovery:
    """Clients of all addresses, and the models of those that have answered."""

    patience: Patience  # of the clients
    shown: RenewedCredentials | None  # certificates of the clients; None: plaintext
    trusted: bool  # drafters are; the chat template of an untrusted one is never run
    updated: bool  # as of `Pipeline`

    def __post_init__(self) -> None:
        self.closed = False
        self.services = Services(Roster("target", ServiceClient.reachable), Roster("drafter", ServiceClient.reachable))
        self.models: Models | None = None  # once a target has described itself; with a drafter once one has
        self._agreed = False  # at some time no target that was there contradicted another one
        self._targets: Members = {}
        self._drafters: Members = {}
        self._parted: list[tuple[Roster[Any], str, Probe]] = []  # removed, with sessions that still go on
        self.drafter_known = asyncio.Event()  # a drafter has described itself
        self._known = asyncio.Event()  # a target has
        self._learning = asyncio.Lock()  # one service at a time
        self._following = asyncio.Lock()  # calls of `follow` are carried out in order: the last one counts

    @property
    def usable(self) -> bool:
        """Whether outputs can be made: a target is known, and at first no other one contradicts it."""
        ours = self._targets.values()
        agree = self.updated or all(one.tried.done() and one.mismatch is None for one in ours)
        self._agreed = self._agreed or (self.models is not None and agree)
        return self._agreed

    async def gather(self, needs_drafter: bool) -> None:
        """Return when a target is known, and every other service was asked once, from now on, or has had its time.

        Raises ServiceError: no target is there, or no drafter and one is needed; RequestError: the targets serve models
        that differ, or the drafter that is needed does not fit them.
        """
        loop = asyncio.get_running_loop()
        seconds = self.patience.describe_seconds
        until = loop.time() + (seconds if needs_drafter else min(seconds, OTHERS_SECONDS))
        for one in (*self._targets.values(), *self._drafters.values()):
            one.retry()
        await self._first_target()
        ours, theirs = list(self._targets.values()), list(self._drafters.values())
        await asyncio.wait([one.tried for one in (*ours, *theirs)], timeout=max(0.0, until - loop.time()))
        if needs_drafter and (starting := [one.tried for one in theirs if one.lives]):
            await asyncio.wait(starting)
        for one in ours:
            if one.mismatch is not None and not self.updated:
                raise RequestError(str(one.mismatch))
        if needs_drafter and not len(self.services.drafters):
            if unfit := [one.mismatch for one in theirs if one.mismatch is not None]:
                raise RequestError(str(unfit[0]))
            raise next((one.error for one in theirs if one.error), TimedOut("no drafter answered"))
        for one in (*ours, *theirs):
            one.warn()
        self._agreed = True

    @property
    def target_there(self) -> bool:
        return any(one.reachable for one in self._targets.values())

    @property
    def target_fault(self) -> str:
        """Why some targets are not used now, without addresses; empty if all are."""
        return _fault_of(self._targets)

    @property
    def drafter_fault(self) -> str:
        """The same of drafters."""
        return _fault_of(self._drafters)

    async def follow(self, targets: Collection[str], drafters: Collection[str]) -> None:
        """Use these addresses from now on: probe new ones, and open no session at others. If this is cancelled, all
        of it was done, or nothing."""
        roles = (
            ("targets", targets, self._targets, TargetClient, self._welcome_target),
            ("drafters", drafters, self._drafters, DrafterClient, self._welcome_drafter),
        )
        async with self._following:
            for role, staying, members, connected, welcome in roles:
                roster = self.services.of(role)
                for address in [address for address in members if address not in staying]:
                    members[address].stop()
                    roster.remove(address)
                    self._parted.append((roster, address, members.pop(address)))
                for address in [address for address in staying if address not in members]:
                    client = connected(address, self.patience, tls=self.shown)
                    parted = lambda *gone, role=role: self.services.of(role).remove(*gone)  # noqa: E731
                    members[address] = Probe(client, welcome, parted)
            for one in [one for one in self._parted if one[1] not in one[0]]:  # whose sessions have ended
                await one[2].close()
                self._parted.remove(one)

    async def close(self) -> None:
        self.closed = True
        parted = [member for _, _, member in self._parted]
        for member in (*self._targets.values(), *self._drafters.values(), *parted):
            await member.close()

    async def _first_target(self) -> None:
        while self.models is None:
            async with self._following:  # others may be coming
                waiting = {one.tried for one in self._targets.values() if not one.tried.done()}
            if not waiting:
                errors = [one.error for one in self._targets.values() if one.error is not None]
                if len(errors) < 2:
                    raise errors[0] if errors else Unreachable("the targets are gone")
                raise type(errors[0])(f"none of {len(errors)} targets answered: {'; '.join(map(str, errors))}")
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

    async def _welcome_target(self, client: TargetClient, about: Description) -> None:
        async with self._learning:
            known = None if self.models is None else self.models.target
            if known is None or (about != known and not len(self.services.targets)):
                self.models = await asyncio.to_thread(_learned, about, self.models)
                self._known.set()
                if known is not None and about.fingerprint != known.fingerprint:
                    # Outputs of the model before do not go on here.
                    self.services.targets.retire(Replaced(REPLACED.format(repr(known.model))))
                    self.services = replace(self.services, targets=Roster("target", ServiceClient.reachable))
                known = about
            if about.fingerprint != known.fingerprint or about.context < known.context:
                raise MismatchError(_difference(client.service, about, known))
            self.services.targets.add(client.address, client)

    async def _welcome_drafter(self, client: DrafterClient, about: Description) -> None:
        await self._known.wait()
        async with self._learning:
            assert self.models is not None
            known = self.models.drafter
            if known is None or (_served(about) != _served(known) and not len(self.services.drafters)):
                about = about if self.trusted else replace(about, chat_template=None)
                self.models = await asyncio.to_thread(_paired, self.models, about)
                if known is not None:
                    self.services.drafters.retire(Replaced("the drafters have another vocabulary now"))
                    self.services = replace(self.services, drafters=Roster("drafter", ServiceClient.reachable))
            elif _served(about) != _served(known):
                raise MismatchError(
                    f"it serves {about.model!r}, and another drafter {known.model!r} with other tokens or another "
                    "affinity matrix; all drafters must serve the same vocabulary"
                )
            self.services.drafters.add(client.address, client)
            self.drafter_known.set()


def _fault_of(members: Members) -> str:
    faults = [fault for one in members.values() if (fault := one.fault)]
    many = f"{len(faults)} of {len(members)} " if len(members) > 1 else ""
    return f"{many}{'; '.join(dict.fromkeys(faults))}" if faults else "" if members else "none there"


def _served(about: Description) -> tuple[str, str, bool]:
    """What all drafters must have in common: the vocabulary, the affinity matrix, whether they copy."""
    return about.fingerprint, about.affinity, about.copies


def _difference(service: str, about: Description, known: Description) -> str:
    one, other = (f"{each.model!r} ({each.fingerprint[:12]}, {each.context} tokens)" for each in (about, known))
    alike = (
        "a shorter context" if about.fingerprint == known.fingerprint else "other weights or dtype, or another version"
    )
    what = alike if _ids(about) == _ids(known) else "another tokenizer"
    return f"{service} serves {one} and another target {other}: {what}; all targets must serve the same model"


def _ids(about: Description) -> tuple[object, ...]:
    """All that decides what ids mean."""
    return about.tokenizer_json, about.controls, about.stops, about.vocabulary_size


def _learned(target: Description, before: Models | None) -> Models:
    """With the drafter of the models before. With vocabularies of 128,000 tokens this takes a second."""
    if before is not None and _ids(target) == _ids(before.target):  # its vocabulary is known
        return replace(before, target=target)
    return Models.of(target, None if before is None else before.drafter, read_tokenization).prepare()


def _paired(models: Models, drafter: Description) -> Models:
    """Raises MismatchError if no request could use this drafter with this target."""
    paired = Models.of(models.target, drafter, read_tokenization, models.tokenization)
    try:
        _ = paired.reads_hidden
    except RequestError as error:
        raise MismatchError(str(error)) from error
    return paired.prepare()


def read_tokenization(description: Description, side: Side) -> Tokenization:
    """The tokenizer of a description that a service sent. Raises BadMessage if it cannot be used."""
    try:
        return tokenization_of(description, side)
    except ValueError as error:
        raise BadMessage(
            f"the tokenizer of the {side.name.lower()} {description.model!r} cannot be used: {error}"
        ) from error
