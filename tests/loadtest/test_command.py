"""`crossdraft loadtest`: a real test of started services, and what is refused."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.cli.conftest import Cli

SCHEMA = Path(__file__).parents[2] / "deploy" / "loadtest" / "report.schema.json"
DELAY = 3  # ms, one way
FIGURES = ("first_token_ms", "between_chunks_ms", "per_token_ms", "end_to_end_ms")


def test_started_services_over_http_and_grpc_beside_a_pipeline(
    cli: Cli, tmp_path: Path, target_folder: Path, drafter_folder: Path
) -> None:
    models = "--target-model", target_folder, "--drafter-model", drafter_folder
    ways = "--over", "http", "--over", "grpc", "--compare", "--delay-ms", DELAY, "--far", "target"
    load = "--clients", 2, "--requests", 3, "--warm-up", 1, "--max-tokens", 8, "--ignore-eos", "--ttft-ms", 60_000
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "def f("}\n{"turns": ["Say"]}\n')
    report, lines, picture = (tmp_path / f"report.{kind}" for kind in ("json", "csv", "png"))
    files = "--prompts", prompts, "--json", report, "--csv", lines, "--plot", picture
    done = cli("loadtest", *models, *ways, *load, *files)
    assert done.code == 0, done.err
    found = json.loads(report.read_text())
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(found)
    assert [run["way"] for run in found["runs"]] == ["HTTP", "gRPC", "in process"]
    for run in found["runs"]:
        assert_measured(run)
    assert [one["way"] for one in found["comparisons"]] == ["HTTP", "gRPC"]
    assert all(one["end_to_end_ms"]["count"] == 3 for one in found["comparisons"])
    assert len(lines.read_text().splitlines()) == 1 + 9
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "orchestrator and target" in done.out
    assert "added to in process" in done.out


def assert_measured(run: dict[str, Any]) -> None:
    """Every figure is there, and the target is as far away as was asked for."""
    summary = run["summary"]
    assert (summary["requests"], summary["errors"], summary["tokens"]) == (3, {}, 24)
    assert all(summary[name]["count"] > 0 for name in FIGURES)
    assert (summary["front_ms"] is None) == (run["way"] == "in process")
    assert summary["goodput"]["share"] == 1
    assert summary["acceptance"]["tokens_per_pass"] >= 1
    assert [len(one["chunks_ms"]) for one in run["requests"]] == [8] * 3
    target = summary["hops"][0]
    assert target["role"] == "target"
    assert target["questions"] >= 3
    assert target["wire_ms"] >= 2 * DELAY
    assert target["bytes_per_token"] > 0
    assert 0 < target["model_share"] <= 1
    assert 0 <= target["idle_share"] < 1
    assert target["serialization_ms_per_token"] > 0


def test_a_server_that_is_not_there(cli: Cli) -> None:
    for address in (("--url", "http://127.0.0.1:9"), ("--server", "127.0.0.1:9")):
        done = cli("loadtest", *address, "--requests", 1)
        assert (done.code, done.out) == (1, "")
        assert "the first requests failed" in done.err


def test_other_servers_need_no_trace(cli: Cli) -> None:
    assert "--no-trace" in cli("loadtest", "--help").out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--rate", "1", "--clients", "2"], "--rate and --clients are two kinds of load"),
        (["--clients", "2", "--most-at-once", "3"], "--most-at-once is for --rate"),
        (["--rate", "0"], "--rate must be above 0"),
        (["--clients", "0"], "--clients must be at least 1"),
        (["--requests", "0"], "--requests must be at least 1"),
        (["--warm-up", "-1"], "--warm-up must be 0 or more"),
        (["--repeat", "0"], "--repeat must be at least 1"),
        (["--seed", "-1"], "--seed must be between"),
        (["--timeout", "0"], "--timeout must be above 0"),
        (["--max-tokens", "0"], "max_tokens must be at least 1"),
        (["--method", "nonsense"], "nonsense"),
        (["--ttft-ms", "0"], "--ttft-ms must be above 0"),
        (["--delay-ms", "a"], "--delay-ms takes numbers"),
        (["--pace-target", "fast"], "a pace is A,B"),
        (["--prompts", "/nowhere"], "cannot read the prompts"),
        (["--json", "/nowhere/report.json"], "cannot write /nowhere/report.json"),
        (["--plot", "report.txt"], "--plot writes .png"),
        (["--url", "nowhere"], "--url must be such as"),
        (["--server", "nowhere"], "--server must be HOST:PORT"),
        (["--server", "127.0.0.1:9", "--compare"], "--compare and --delay-ms are for services that are started"),
        (["--target", "127.0.0.1:9", "--delay-ms", "0"], "--compare and --delay-ms are for services that are started"),
        (["--drafter", "127.0.0.1:9"], "--drafter has an address and --target has none"),
    ],
)
def test_wrong_options(cli: Cli, options: list[str], complaint: str) -> None:
    done = cli("loadtest", *options)
    assert (done.code, done.out) == (2, "")
    assert complaint in done.err
    assert done.err.count("\n") == 1
