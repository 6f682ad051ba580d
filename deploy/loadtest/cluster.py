#!/usr/bin/env python3
"""Latency between the nodes of a Ray cluster: one process of each kind on a node of your choice, and a load test.

    cluster.py CONFIG --front NODE --orchestrator NODE --target NODE --drafter NODE [options of `crossdraft loadtest`]

Run it in a checkout on a node of the cluster, with the Python that crossdraft is installed for there; the load test is
the checkout's. Nodes are addresses as `crossdraft status` shows them. The file's first model, with one replica of each
kind, is deployed in place of what runs (its other resources stay as they are), and stays until the next `crossdraft
deploy`. Requests go to the front, and are drafted in lock-step rounds (-k 5) whether or not that pays. `--keep`
measures what is deployed already.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

ROLES = ("http", "orchestrator", "target", "drafter")
LABORATORY = Path(__file__).resolve().parents[2] / "lab"  # which a node's wheel has not
COMMAND = (sys.executable, "-m", "crossdraft")
MUCH = 0.001  # of a node's own resource, which is 1
FIGURES = (("TTFT", "first_token_ms"), ("TPOT", "per_token_ms"), ("client to front and back", "front_ms"))


def on(resources: dict[str, Any], node: str) -> dict[str, Any]:
    """The same resources, of this node."""
    custom = {name: much for name, much in resources.get("custom", {}).items() if not name.startswith("node:")}
    return resources | {"custom": custom | {f"node:{node}": MUCH}}


def placed(configuration: dict[str, Any], nodes: dict[str, str]) -> dict[str, Any]:
    """The first model alone, with one replica of each kind, on these nodes by role."""
    model = configuration["models"][0]
    model["orchestrators"] = 1
    model["orchestrator_resources"] = on(model.get("orchestrator_resources", {}), nodes["orchestrator"])
    model["drafters"] = model["drafters"][:1]
    for role, service in (("target", model["target"]), ("drafter", model["drafters"][0])):
        service["replicas"], service["resources"] = 1, on(service.get("resources", {}), nodes[role])
    http = configuration.setdefault("http", {})
    http["replicas"], http["resources"] = 1, on(http.get("resources", {}), nodes["http"])
    return {**{name: part for name, part in configuration.items() if name != "grpc"}, "models": [model]}


def crossdraft(*words: str) -> str:
    """Runs a command; what it wrote on stdout. Its errors go to stderr."""
    with_laboratory = os.environ | {"PYTHONPATH": str(LABORATORY)}
    return subprocess.run([*COMMAND, *words], env=with_laboratory, stdout=subprocess.PIPE, text=True, check=True).stdout


def where() -> dict[str, list[str]]:
    """The nodes of the processes that serve, by role."""
    status = json.loads(next(line for line in crossdraft("status", "--json").splitlines() if line.startswith("{")))
    return {role: [one["node"] for one in status["processes"] if one["role"] == role] for role in ROLES}


def row(name: str, spread: dict[str, float] | None, count: str = "") -> str:
    """A line of the table."""
    figures = [""] * 4 if spread is None else [f"{spread[part]:.1f}" for part in ("mean", "p50", "p90", "p99")]
    return f"| {' | '.join((name, str(spread['count']) if spread else count, *figures))} |"


def table(report: dict[str, Any]) -> list[str]:
    """What clients and orchestrator saw, in ms, with the number of samples of each."""
    (found,) = report["results"]
    rows = [row(name, found[part]) for name, part in FIGURES]
    rows += [row(f"orchestrator to {hop['role']} and back", hop["round_trip_ms"]) for hop in found["hops"]]
    drafted = found["tokens_per_pass"]
    said = (
        f"{found['requests']} requests, errors {found['errors'] or 'none'}, {found['tokens_per_second']:.1f} tokens/s, "
    )
    said += f"{drafted:.2f} tokens a pass" if drafted else "nothing was drafted"
    return ["| ms | samples | mean | p50 | p90 | p99 |", "| --- | --- | --- | --- | --- | --- |", *rows, "", said]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configuration", type=Path, metavar="CONFIG")
    for role, name in zip(ROLES, ("front", *ROLES[1:]), strict=True):
        parser.add_argument(f"--{name}", dest=role, required=True, metavar="NODE")
    parser.add_argument("--keep", action="store_true", help="deploy nothing")
    given, options = parser.parse_known_args()
    nodes = {role: getattr(given, role) for role in ROLES}
    configuration = yaml.safe_load(given.configuration.read_text())
    if "applications" in configuration:  # a file of Ray Serve's
        configuration = configuration["applications"][0]["args"]
    with tempfile.TemporaryDirectory() as folder:
        if not given.keep:
            file = given.configuration.with_name(f"{given.configuration.stem}-placed.yaml")  # beside what it names
            file.write_text(yaml.safe_dump(placed(configuration, nodes), sort_keys=False))
            crossdraft("deploy", str(file))
        found = where()
        if found != {role: [node] for role, node in nodes.items()}:
            raise SystemExit(f"wanted are {nodes}, and there are {found}: leave out --keep, or wait")
        report = Path(folder) / "report.json"
        url = f"http://{nodes['http']}:{configuration.get('http', {}).get('port', 8000)}"
        crossdraft("loadtest", "--url", url, "-k", "5", "--ignore-eos", "--json", str(report), *options)
        measured = json.loads(report.read_text())
    print(", ".join(f"{role} on {node}" for role, node in nodes.items()))
    print(*table(measured), sep="\n")


if __name__ == "__main__":
    main()
