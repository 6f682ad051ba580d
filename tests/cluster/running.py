"""A Ray cluster on one machine, and what is done with one."""

import asyncio
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx2 as httpx
import ray
from openai import AsyncOpenAI
from ray.exceptions import RaySystemError

from crossdraft.cluster import capacity
from crossdraft.cluster.capacity import NotServedError
from crossdraft.cluster.config import parse
from crossdraft.cluster.deploy import Waiting, deploy
from crossdraft.cluster.status import DIRECTORY, NAMESPACE, Entry, Role
from tests.cluster.machines.streams import Stream, Streams
from tests.serving.exposed import samples

__all__ = ["NotServedError", "RunningCluster", "ray", "running"]
HEAD, TARGETS = "127.0.0.2", "127.0.0.3"  # Ray takes 127.0.0.1 for another address
OFFERS = {HEAD: {"ingress": 4, "drafter": 3}, TARGETS: {"target": 3, "orchestrator": 8}}
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",
    # On a busy machine processes take long to start: longer than Ray and Serve wait for them.
    "RAY_gcs_server_port_wait_time_s": "600",
    "RAY_raylet_start_wait_time_s": "600",
    "RAY_agent_register_timeout_ms": "600000",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_health_check_failure_threshold": "60",
    **{f"RAY_SERVE_PROXY_{kind}_CHECK_TIMEOUT_S": "60" for kind in ("READY", "HEALTH")},
    "RAY_enable_metrics_collection": "0",  # Ray's own, and its lists of tasks: nobody reads them
    "RAY_task_events_report_interval_ms": "0",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "0",  # else each process counts anew ten times a second
    # Serve hears of outputs that are under way each second, not only every ten: its replicas come and go sooner.
    **{f"RAY_SERVE_{kind}_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1" for kind in ("REPLICA", "HANDLE")},
    "RAY_worker_niceness": "0",  # as nice as the tests, not more
    "RAY_memory_monitor_refresh_ms": "0",  # else it ends processes where others have taken the machine's memory
    "OMP_NUM_THREADS": "1",
}
LIMIT_SECONDS = 600.0  # seconds for what must come to pass
POLL_SECONDS = 0.5  # often enough, and little work for the cluster
ATTEMPTS = 10  # to start Ray
START_SECONDS = 600.0  # of each attempt, for a node to be known
COMMAND_SECONDS = 1200.0
KEY = "0123456789abcdef"
MODEL = "small"
TRUSTED = ssl.create_default_context()  # which each client would make anew
OUTPUTS = 16  # of an orchestrator at once
PROMPT = "def main("


@dataclass(frozen=True)
class RunningCluster:
    """What tests need of it."""

    folder: Path  # with Ray's logs in it
    address: str  # of Ray
    http: int  # port
    grpc: int
    metrics: int  # of each node

    @property
    def url(self) -> str:
        """Of the HTTP front."""
        return f"http://127.0.0.1:{self.http}"

    def configuration(self, targets: str = "replicas: 2", drafters: str = "", tls: str = "") -> str:
        """A configuration; what is given goes into its parts."""
        (self.folder / "keys").write_text(f"tester {KEY}\n")
        cache = "" if "cache_mib" in targets else "cache_mib: 64,"
        return f"""\
models:
  - name: {MODEL}
    target: {{model: bundled:target, threads: 1, {cache}
      resources: {{cpus: 0.5, custom: {{target: 1}}}}, {targets}}}
    drafters:
      - {{name: byte-level, model: bundled:drafter-b, threads: 1, cache_mib: 64,
        resources: {{cpus: 0.5, custom: {{drafter: 1}}}}}}
{drafters}
    orchestrators: 2
    max_outputs: {OUTPUTS}
    orchestrator_resources: {{cpus: 0.1, custom: {{orchestrator: 1}}}}
http: {{port: {self.http}, resources: {{cpus: 0.1, custom: {{ingress: 1}}}}}}
grpc: {{host: {HEAD}, port: {self.grpc}, resources: {{cpus: 0.1, custom: {{ingress: 1}}}}}}
security: {{api_keys: keys{tls}}}
metrics_port: {self.metrics}
log_format: json
grace_seconds: 2
"""

    def command(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Types `crossdraft WORDS`, with the cluster's address."""
        line = [sys.executable, "-m", "crossdraft", *words, "--address", self.address]
        return subprocess.run(line, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)

    def file(self, text: str) -> str:
        """The name of a file with a configuration."""
        path = self.folder / "small.yaml"
        path.write_text(text)
        return str(path)

    def deploy(self, text: str, seconds: float = LIMIT_SECONDS) -> list[str]:
        """Brings a configuration; what was said meanwhile."""
        said: list[str] = []
        with patch.object(capacity, "ANSWER_SECONDS", LIMIT_SECONDS):
            deploy(parse(text, folder=self.folder), Waiting(seconds=seconds, say=said.append))
        return said

    def entries(self, role: Role | None = None) -> list[Entry]:
        """What answers now. Serve is not asked, as it is for `status`: tests ask again and again."""
        found = ray.get(ray.get_actor(DIRECTORY, NAMESPACE).entries.remote())
        return [one for one in found if role is None or one.role is role]

    def complete(self, *but: Entry) -> bool:
        """Whether everything answers that the configuration has without changes, and these processes no more."""
        entries = self.entries()
        wanted = [Role.TARGET] * 2 + [Role.DRAFTER, Role.ORCHESTRATOR, Role.ORCHESTRATOR, *FRONTS]
        gone = {one.process for one in but}
        return sorted(one.role for one in entries) == sorted(wanted) and gone.isdisjoint(one.process for one in entries)

    def client(self) -> AsyncOpenAI:
        """Of the HTTP front."""
        asking = httpx.AsyncClient(verify=TRUSTED)
        return AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=LIMIT_SECONDS, http_client=asking
        )

    def metric(self, role: Role, name: str, **labels: str) -> float:
        """The sum over all processes of a role, of what has these labels."""
        with httpx.Client(verify=TRUSTED, timeout=LIMIT_SECONDS) as client:
            pages = [client.get(f"http://{one.metrics}/metrics").text for one in self.entries(role)]
        return sum(much for page in pages for has, much in samples(page, name) if labels.items() <= has.items())

    def busy(self) -> float:
        """Outputs under way at orchestrators, and sessions at services."""
        outputs = self.metric(Role.ORCHESTRATOR, "orchestrator_running_outputs")
        return outputs + sum(self.metric(role, "service_open_sessions") for role in (Role.TARGET, Role.DRAFTER))

    def log_of(self, process: int) -> str:
        """What a process wrote on standard error."""
        (path,) = self.folder.glob(f"session_latest/logs/worker-*-{process}.err")
        return path.read_text()


FRONTS = (Role.HTTP, Role.GRPC)
SERVING = [role for role in Role if role is not Role.DIRECTORY]  # they announce themselves


@contextmanager
def running(folder: Path, ports: Sequence[int]) -> Iterator[RunningCluster]:
    """Two nodes, and nothing on them yet; this process is a driver."""
    with patch.dict(os.environ, ENVIRONMENT), ExitStack() as stack:
        faults: list[str] = []
        while True:  # a busy machine may need several attempts
            place = folder / str(len(faults))
            try:
                cluster = stack.enter_context(started(place))
                break
            except (TimeoutError, RuntimeError, RaySystemError) as error:  # a process of Ray's was too late, or is dead
                faults.append(str(error))
                assert len(faults) < ATTEMPTS, faults
        yield RunningCluster(place, cluster.address, *ports)


@contextmanager
def started(folder: Path) -> Iterator[Any]:
    """Ray's nodes, HEAD among them, with this process connected to them; raises TimeoutError or RuntimeError."""
    from ray._common.utils import get_ray_address_file
    from ray.cluster_utils import Cluster

    common: dict[str, Any] = {
        "num_cpus": 4,
        "object_store_memory": 80_000_000,
        "include_dashboard": False,
        "include_log_monitor": False,  # nobody reads what it would print here
        "no_monitor": True,  # no autoscaler
        "dashboard_agent_listen_port": 0,  # else one that systems give to connections
    }
    folder.mkdir()
    # Ray notes its latest cluster there, and on a machine that never ran Ray there is no such folder.
    Path(get_ray_address_file(None)).parent.mkdir(parents=True, exist_ok=True)
    cluster = Cluster()
    try:
        with patch.object(ray._private.services, "get_node", _patient(ray._private.services.get_node)):
            for address, offers in OFFERS.items():
                first = {"temp_dir": str(folder)} if address == HEAD else {}
                cluster.add_node(wait=False, node_ip_address=address, resources=offers, **common, **first)
        cluster.wait_for_nodes(START_SECONDS)
        ray.init(cluster.address, namespace="tests", log_to_driver=False, _node_ip_address=HEAD)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def _patient(asked: Callable[[str, str], Any]) -> Callable[[str, str], Any]:
    """Ray gives a node's processes 30 s to be known, which on a busy machine may not be enough: here they have more.

    A node ends itself if its agents take more than 15 s to start; that one is not waited for.
    """
    before = _ended_nodes()

    def get_node(address: str, node: str) -> Any:
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                return asked(address, node)
            except (RuntimeError, RaySystemError) as error:  # not yet
                if time.monotonic() > until or _ended_nodes() > before:
                    raise TimeoutError(f"node {node} is not known: {error}") from error
            time.sleep(POLL_SECONDS)

    return get_node


def _ended_nodes() -> int:
    """That this process has started, and that have ended by themselves."""
    ended = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it is gone
            ended += f"(raylet) Z {os.getpid()} " in (process / "stat").read_text()
    return ended


async def eventually(holds: Callable[[], bool]) -> None:
    """Returns once it holds; asks again and again, in a thread."""
    until = time.monotonic() + LIMIT_SECONDS
    while not await asyncio.to_thread(holds):
        assert time.monotonic() < until, "it has not come to pass"
        await asyncio.sleep(POLL_SECONDS)


@contextmanager
def unchanged(cluster: RunningCluster) -> Iterator[None]:
    """What the block does leaves every process as it is."""
    before = cluster.entries()
    yield
    asyncio.run(eventually(lambda: cluster.entries() == before))


def kill(entry: Entry) -> None:
    """Ends a process as a crash would."""
    os.kill(entry.process, signal.SIGKILL)


@asynccontextmanager
async def streams(client: AsyncOpenAI, seeds: Sequence[int], tokens: int) -> AsyncIterator[list[Stream]]:
    """Streams with these seeds, each with a piece at least; at the end of the block all have ended, unbroken."""
    made = Streams(client, seeds, tokens, model=MODEL)
    async with asyncio.TaskGroup() as group:
        group.create_task(made.run())
        await made.under_way(1)
        yield [made.current[seed] for seed in seeds]
    assert [one.fault for one in made.ended if one.fault] == []
