"""The figures of BENCHMARKS.md about fronts: `python -m tests.cluster.fronts`, in a checkout.

What a request costs through Ray Serve, through `serve http` and through `serve grpc`, all over the same target and
drafter, which are actors of a cluster on this machine's loopback.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from crossdraft.cluster.directory import Role
from tests.cluster.running import KEY, MODEL, RunningCluster, running
from tests.serving.ports import free_port

COMMAND = (sys.executable, "-m", "crossdraft.cli")
DIRECT = "serve grpc"
HEADINGS = ("front", "first token, ms", "per token, ms", "added to the first token", "added per token")


@dataclass(frozen=True)
class Fronts:
    """Where each one is."""

    http: Mapping[str, str]  # URLs
    grpc: Mapping[str, str]  # HOST:PORT


@dataclass(frozen=True)
class Cost:
    """Of one front: milliseconds, medians over requests; what is added is taken in pairs of the same request."""

    first_token: list[float]
    per_token: list[float]
    added_to_first: list[float]
    added_per_token: list[float]

    @property
    def row(self) -> tuple[str, ...]:
        """Of a table."""
        added = (self.added_to_first, self.added_per_token)
        plain = (f"{median(one):.2f}" for one in (self.first_token, self.per_token))
        return (*plain, *(f"{median(one):+.2f}" if one else "" for one in added))


@contextmanager
def served(role: str, cluster: RunningCluster) -> Iterator[str]:
    """The address of a front of its own, over the cluster's services."""
    (target,), (drafter,) = (cluster.entries(role) for role in (Role.TARGET, Role.DRAFTER))
    over = ("--model", MODEL, "--target", target.address, "--drafter", f"byte-level={drafter.address}")
    command = (*COMMAND, "serve", role, *over, "--port", "0", "--log-level", "warning")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["address"]
        finally:
            process.terminate()


def asked(way: Sequence[str], options: Sequence[str], file: Path) -> dict[str, Any]:
    """What `crossdraft loadtest` reports of one HTTP and one gRPC front that take turns."""
    always = ("--api-key", KEY, "--model", MODEL, "--clients", "1", "--ignore-eos", "--json", str(file))
    subprocess.run((*COMMAND, "loadtest", *way, *always, *options), check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def costs(fronts: Fronts, options: Sequence[str], rounds: int, folder: Path) -> dict[str, Cost]:
    """By front; all of them take turns, each beside the direct one."""
    found = {name: Cost([], [], [], []) for name in (*fronts.http, *fronts.grpc)}
    for _ in range(rounds):
        for name, url in fronts.http.items():
            report = asked(("--url", url, "--server", fronts.grpc[DIRECT]), options, folder / "report.json")
            by_way = {run["way"]: {row["number"]: row for row in run["requests"]} for run in report["runs"]}
            _take(found[name], by_way["HTTP"])
            _take(found[DIRECT], by_way["gRPC"])
            for number, row in by_way["HTTP"].items():
                other = by_way["gRPC"][number]
                found[name].added_to_first.append(row["first_token_ms"] - other["first_token_ms"])
                found[name].added_per_token.append(row["per_token_ms"] - other["per_token_ms"])
    return found


def _take(cost: Cost, rows: Mapping[int, Mapping[str, Any]]) -> None:
    for row in rows.values():
        assert not row["error"], row
        cost.first_token.append(row["first_token_ms"])
        cost.per_token.append(row["per_token_ms"])


def measure(requests: int, tokens: int, rounds: int) -> Iterator[str]:
    """Lines of Markdown, a table for each kind of output."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)))
        cluster = stack.enter_context(running(folder, [free_port(), free_port()]))
        cluster.deploy(cluster.configuration(targets="replicas: 1").replace("orchestrators: 2", "orchestrators: 1"))
        alone, direct = (stack.enter_context(served(role, cluster)) for role in ("http", "grpc"))
        fronts = Fronts({"Ray Serve": cluster.url, "serve http": f"http://{alone}"}, {DIRECT: direct})
        size = ("--requests", str(requests), "--max-tokens", str(tokens), "--repeat", "1", "--warm-up", "2")
        seeded = ("--method", "seeded", "--temperature", "0.8", "--seed", "7")
        for title, options in (
            ("seeded, temperature 0.8, with the drafter", seeded),
            ("greedy, without a drafter", ("--use-drafter", "none")),
        ):
            found = costs(fronts, (*size, *options), rounds, folder)
            yield f"{title}:\n"
            yield f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}"
            for name, cost in found.items():
                yield f"| {name} | {' | '.join(cost.row)} |"
            yield ""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=12, help="of each front in each round")
    parser.add_argument("--tokens", type=int, default=64, help="of each output")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    for line in measure(given.requests, given.tokens, given.rounds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
