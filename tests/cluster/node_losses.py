"""Seeded streams while one of three nodes of two CPUs is lost: `python -m tests.cluster.node_losses`.

Nodes are Ray's emulated ones, of one machine. A node's processes are all killed at once; each row has a cluster of its
own, whose nodes offer room so that the lost one has what the row is about. Clients whose connection is lost ask again.
"""

import argparse
import asyncio
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from crossdraft.cluster.config import parse
from crossdraft.cluster.deploy import Waiting, deploy
from crossdraft.cluster.status import Role, deployed
from tests.cluster.machines.streams import MODEL, REPEATS, Stream, Streams, client_of, faults_of
from tests.cluster.running import ENVIRONMENT, HEAD, tried
from tests.serving.ports import free_port

ONE, OTHER = "127.0.0.3", "127.0.0.4"
CPUS = 2  # of each node
AFTER = 15.0  # seconds that clients go on after the loss
APART_SECONDS = 120.0
# As `deploy/cluster.yaml` sets it. With Ray's own 10 s of patience a front hears no orchestrator for 10 s after a loss.
HEALTH = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "5",
}
COMMON = {"object_store_memory": 80_000_000, "include_dashboard": False, "dashboard_agent_listen_port": 0}
CONFIGURATION = f"""\
models:
  - name: {MODEL}
    target: {{model: bundled:target, threads: 1, cache_mib: 64, replicas: 2,
      resources: {{cpus: 0.4, custom: {{target: 1}}}}}}
    drafters:
      - {{name: byte-level, model: bundled:drafter-b, threads: 1, cache_mib: 64, replicas: 2,
        resources: {{cpus: 0.4, custom: {{drafter: 1}}}}}}
    orchestrators: 2
    orchestrator_resources: {{cpus: 0.1, custom: {{orchestrator: 1}}}}
http: {{port: PORT, resources: {{cpus: 0.1, custom: {{ingress: 1}}}}}}
"""


@dataclass(frozen=True)
class Row:
    """One loss: what the head offers, and each of the others, of which one is lost."""

    name: str
    head: Mapping[str, float]
    others: Mapping[str, float]
    lost: Role  # the node that has most processes of this role


ROWS = (
    Row("drafter", {"target": 2, "orchestrator": 8, "ingress": 8}, {"drafter": 1}, Role.DRAFTER),
    Row("target with orchestrator", {"drafter": 2, "ingress": 8}, {"target": 1, "orchestrator": 8}, Role.ORCHESTRATOR),
    Row("orchestrator", {"target": 2, "drafter": 2, "ingress": 8}, {"orchestrator": 8}, Role.ORCHESTRATOR),
    Row("ingress", {"target": 2, "drafter": 2, "orchestrator": 8}, {"ingress": 8}, Role.HTTP),
    Row(
        "any node but the head", {"ingress": 8}, dict.fromkeys(Role, 1.0) | {"orchestrator": 8, "ingress": 8}, Role.HTTP
    ),
)
HEADINGS = (
    "lost",
    "streams",
    "broken",
    "texts that differ",
    "asked again",
    "longest pause",
    "of who asked again",
    "back apart after, s",
)


def where(role: Role) -> Counter[str]:
    """Nodes of the processes of a role."""
    return Counter(one.node for one in deployed().processes if one.role is role)


def power_off(cluster: Any, node: Any) -> None:
    """Ends all processes of a node at once."""
    raylet = node.all_processes["raylet"][0].process.pid
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == raylet:
            os.kill(int(process.name), signal.SIGKILL)
    os.kill(raylet, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)


async def row(one: Row, clients: int, tokens: int, folder: Path) -> tuple[str, ...]:
    """What became of the streams."""
    nodes = {HEAD: one.head, ONE: one.others, OTHER: one.others}
    port = free_port()
    with ExitStack() as stack:
        _, cluster = tried(stack, folder, nodes, CPUS)
        await asyncio.to_thread(deploy, parse(CONFIGURATION.replace("PORT", str(port))), Waiting(say=print))
        async with client_of(f"http://127.0.0.1:{port}") as client:
            seeds = range(1, clients + 1)
            undisturbed = await Streams(client, seeds, tokens).run()
            address = next(address for address, _ in where(one.lost).most_common() if address != HEAD)
            print(one.name, {role.value: dict(where(role)) for role in Role}, "lost:", address, flush=True)
            (node,) = [each for each in cluster.list_all_nodes() if each.node_ip_address == address]
            streams, over = Streams(client, seeds, tokens, REPEATS), asyncio.Event()
            running = asyncio.create_task(streams.keep_on(over))
            await streams.under_way()
            at = time.monotonic()
            await asyncio.to_thread(power_off, cluster, node)
            await asyncio.sleep(AFTER)
            over.set()
            ended = await running
            found = written(one, at, ended, faults_of(ended, undisturbed))
            print(*found, sep=" | ", flush=True)
        return (*found, returned(cluster, one, address))


def returned(cluster: Any, one: Row, address: str) -> str:
    """Seconds until two orchestrators are on two nodes, when the lost node has returned."""
    before = time.monotonic()
    cluster.add_node(wait=False, node_ip_address=address, resources=dict(one.others), num_cpus=CPUS, **COMMON)
    while len(places := where(Role.ORCHESTRATOR)) < 2 and HEAD not in places:
        if time.monotonic() - before > APART_SECONDS:
            return f"not within {APART_SECONDS:.0f} ({dict(places)})"
        time.sleep(0.25)
    return f"{time.monotonic() - before:.0f}"


def written(one: Row, at: float, ended: list[Stream], faults: list[str]) -> tuple[str, ...]:
    """One line of the table."""
    print(*faults[:3], sep="\n")
    broken = sum(bool(each.fault) for each in ended)
    counts = (len(ended), broken, len(faults) - broken, sum(each.repeats for each in ended))
    pauses: dict[bool, list[float]] = {False: [], True: []}  # by whether the client has asked again
    for each in ended:
        pauses[each.repeats > 0].append(each.pause(at) or 0.0)
    return (one.name, *map(str, counts), *(f"{max(seconds, default=0.0):.2f} s" for seconds in pauses.values()))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=8, help="that stream at once")
    parser.add_argument("--tokens", type=int, default=200, help="of each output")
    parser.add_argument("--only", default="", metavar="WORDS", help="rows whose names have these words")
    given = parser.parse_args()
    lines = []
    with patch.dict(os.environ, ENVIRONMENT | HEALTH):
        for one in ROWS:
            if given.only in one.name:
                with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
                    lines.append(asyncio.run(row(one, given.clients, given.tokens, Path(folder))))
                print(*lines[-1], sep=" | ", flush=True)
    for line in (HEADINGS, ["---"] * len(HEADINGS), *lines):
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
