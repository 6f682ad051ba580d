"""The replicas that a configuration asks for, and what to do about those that run. Pure."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from crossdraft.serving.cluster.fronting import HostedGrpc
from crossdraft.serving.cluster.hosted import Hosted
from crossdraft.serving.cluster.naming import actor_name, slot_name, slot_of
from crossdraft.serving.cluster.services import HostedService
from crossdraft.serving.cluster.told import fronted, tls_of
from crossdraft.serving.configuration import Configuration


@dataclass(frozen=True)
class Replica:
    """One actor that hosts something."""

    name: str
    hosted: Hosted

    @property
    def slot(self) -> str:
        """Its place, which another one has had, perhaps."""
        return slot_of(self.name)


@dataclass(frozen=True)
class Changes:
    """From what runs to what is wanted."""

    begun: tuple[Replica, ...]  # in places where nothing runs
    replaced: tuple[tuple[str, Replica], ...]  # the name of an actor, and what comes instead
    kept: tuple[Replica, ...]
    ended: tuple[str, ...]  # names of actors in whose place nothing is wanted


def services_of(configuration: Configuration) -> tuple[Replica, ...]:
    """All targets and drafters."""
    return tuple(_services(configuration))


def fronts_of(configuration: Configuration) -> tuple[Replica, ...]:
    """All fronts that are actors of their own."""
    if configuration.grpc is None:
        return ()
    hosted = HostedGrpc(fronted(configuration), configuration.grpc, configuration.grace_seconds)
    return tuple(_replicas(hosted, configuration.grpc.replicas))


def is_front(name: str) -> bool:
    """Whether an actor of this name hosts a front: it is of no model."""
    return slot_of(name).count("/") == 1


def changes(wanted: Sequence[Replica], running: Collection[str]) -> Changes:
    """Compares replicas with the names of the actors that run."""
    kept = tuple(one for one in wanted if one.name in running)
    free = {one.slot: one for one in wanted if one not in kept}
    replaced, ended = [], []
    for name in sorted(set(running) - {one.name for one in kept}):
        instead = free.pop(slot_of(name), None)
        if instead is None:
            ended.append(name)
        else:
            replaced.append((name, instead))
    return Changes(tuple(free.values()), tuple(replaced), kept, tuple(ended))


def _services(configuration: Configuration) -> Iterator[Replica]:
    tls, grace = tls_of(configuration), configuration.grace_seconds
    for model in configuration.models:
        for service in (model.target, *model.drafters):
            hosted = HostedService(model.name, service, tls, grace, configuration.metrics, configuration.log_format)
            yield from _replicas(hosted, service.replicas)


def _replicas(hosted: Hosted, count: int) -> Iterator[Replica]:
    for number in range(count):
        slot = slot_name(hosted.model, hosted.role, hosted.name, number)
        yield Replica(actor_name(slot, hosted.digest), hosted)
