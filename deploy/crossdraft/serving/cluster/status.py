"""What runs on a cluster."""

from dataclasses import asdict, dataclass
from typing import Any

import ray
from ray import serve
from ray.serve.schema import DeploymentStatusOverview

from crossdraft.serving.cluster.directory import Entry
from crossdraft.serving.cluster.naming import APPLICATION, DIRECTORY, NAMESPACE

RUNNING = "RUNNING"
DEPLOYMENT = ("name", "state", "replicas", "message")


@dataclass(frozen=True)
class Deployed:
    """What runs now."""

    processes: tuple[Entry, ...]  # that answer
    state: str  # of the application, in Serve's words
    deployments: tuple[tuple[str, str, int, str], ...]  # of Serve: name, state, replicas that run, what is wrong

    def plain(self) -> dict[str, object]:
        """For JSON."""
        deployments = [dict(zip(DEPLOYMENT, one, strict=True)) for one in self.deployments]
        processes = [asdict(entry) | {"role": entry.role.value} for entry in self.processes]
        return {"processes": processes, "state": self.state, "deployments": deployments}


def deployed() -> Deployed:
    """Raises ValueError if nothing is deployed."""
    directory: Any = ray.get_actor(DIRECTORY, NAMESPACE)
    entries: tuple[Entry, ...]
    _, entries = ray.get(directory.entries.remote())
    found = serve.status().applications.get(APPLICATION)
    if found is None:
        return Deployed(tuple(entries), "not started", ())
    deployments = ((name, one.status.value, _running(one), one.message) for name, one in found.deployments.items())
    return Deployed(tuple(entries), found.status.value, tuple(deployments))


def _running(deployment: DeploymentStatusOverview) -> int:
    return sum(count for state, count in deployment.replica_states.items() if state == RUNNING)
