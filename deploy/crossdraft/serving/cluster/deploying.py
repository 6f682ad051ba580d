"""Brings a configuration onto a running Ray cluster: services as detached actors, fronts and orchestrators by Serve."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import ray
from ray import serve
from ray.serve.schema import DeploymentStatusOverview

from crossdraft.serving.cluster.application import application, tls_of
from crossdraft.serving.cluster.directing import DirectoryActor, directory
from crossdraft.serving.cluster.directory import Entry
from crossdraft.serving.cluster.hosting import Hosted, ServiceActor
from crossdraft.serving.cluster.naming import APPLICATION, DIRECTORY, NAMESPACE, service_name
from crossdraft.serving.configuration import Configuration

ALWAYS = -1  # restarts
MOST_CALLS = 1000  # of one actor at once


@dataclass(frozen=True)
class Replica:
    """One service of a configuration."""

    name: str  # of its actor
    hosted: Hosted


def replicas_of(configuration: Configuration) -> Iterator[Replica]:
    """All services that a configuration asks for."""
    for model in configuration.models:
        for service in (model.target, *model.drafters):
            hosted = Hosted(
                model.name, service, tls_of(configuration), configuration.grace_seconds, configuration.log_format
            )
            for number in range(service.replicas):
                yield Replica(service_name(model.name, hosted.drafter, number), hosted)


def deploy(configuration: Configuration) -> tuple[Entry, ...]:
    """Starts what is not there yet, and returns once every service answers and Serve runs the application.

    Raises:
        ValueError: a service cannot be run with its options.
    """
    ray.remote(DirectoryActor).options(
        name=DIRECTORY,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=ALWAYS,
        max_concurrency=MOST_CALLS,
    ).remote()
    actors = [_started(replica) for replica in replicas_of(configuration)]
    entries: list[Entry] = ray.get([actor.ready.remote() for actor in actors])
    serve.start(http_options={"host": configuration.http.host, "port": configuration.http.port})
    serve.run(application(configuration), name=APPLICATION, route_prefix="/")
    return tuple(entries)


def undeploy() -> None:
    """Ends everything that `deploy` started."""
    serve.delete(APPLICATION)
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["namespace"] == NAMESPACE:
            ray.kill(ray.get_actor(named["name"], NAMESPACE))


@dataclass(frozen=True)
class Deployed:
    """What runs on a cluster."""

    services: tuple[Entry, ...]  # that answer
    deployments: tuple[tuple[str, str, int], ...]  # of Serve: name, state, replicas that run

    def plain(self) -> dict[str, object]:
        """For JSON."""
        services = [asdict(entry) | {"role": entry.role} for entry in self.services]
        names = ("name", "state", "replicas")
        return {"services": services, "deployments": [dict(zip(names, one, strict=True)) for one in self.deployments]}


def deployed() -> Deployed:
    """What runs now; raises ValueError if nothing is deployed."""
    found = serve.status().applications.get(APPLICATION)
    deployments = () if found is None else found.deployments.items()
    return Deployed(entries(), tuple((name, one.status.value, _running(one)) for name, one in deployments))


def _running(deployment: DeploymentStatusOverview) -> int:
    return sum(count for state, count in deployment.replica_states.items() if state.value == "RUNNING")


def entries() -> tuple[Entry, ...]:
    """Which services answer now; raises ValueError if nothing is deployed."""
    _, found = ray.get(directory().entries.remote())
    return tuple(found)


def _started(replica: Replica) -> Any:
    resources = replica.hosted.service.resources
    return (
        ray.remote(ServiceActor)
        .options(
            name=replica.name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            scheduling_strategy="SPREAD",
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            resources=dict(resources.custom),
            max_restarts=ALWAYS,
            max_task_retries=0,
            max_concurrency=MOST_CALLS,
        )
        .remote(replica.hosted)
    )
