"""`crossdraft loadtest`: a real test of started services, and what is refused."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from crossdraft.cli.prompts import Prompt
from crossdraft.cli.running import CommandFailed, run_to_end
from crossdraft.config.commands import ReportFile
from crossdraft.lab.loadtest.command import LoadTest, Stages, generate_of
from crossdraft.lab.loadtest.options import LoadOptions, LoadRequests
from crossdraft.lab.loadtest.report import LoadReport
from crossdraft.lab.loadtest.requests import Request
from crossdraft.lab.loadtest.runner import Chunk, LoadClient, Pieces, RequestFailedError
from tests.cli.conftest import Cli
from tests.lab.loadtest.values import CONDITIONS, FIGURES, validated

DELAY = 3  # ms, one way
LATENCIES = ("first_token_ms", "between_chunks_ms", "per_token_ms", "end_to_end_ms")


@pytest.mark.full
def test_started_services_over_http_and_grpc_beside_a_pipeline(
    cli: Cli, tmp_path: Path, target_folder: Path, drafter_folder: Path
) -> None:
    models = "--target-model", target_folder, "--drafter-model", drafter_folder
    ways = "--over", "http", "--over", "grpc", "--compare", "--delay-ms", DELAY
    load = "--clients", 2, "--requests", 3, "--warm-up", 1, "--max-tokens", 8, "--ignore-eos"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "def f("}\n{"turns": ["Say"]}\n')
    report = tmp_path / "report.json"
    files = "--prompts", prompts, "--json", report
    done = cli("loadtest", *models, *ways, *load, *files)
    assert done.code == 0, done.err
    found = validated(json.loads(report.read_text()))
    assert [one["way"] for one in found["runs"]] == ["HTTP", "gRPC", "in process"]
    for one in found["runs"]:
        assert_measured(one)
    assert [one["way"] for one in found["comparisons"]] == ["HTTP", "gRPC"]
    assert all(one["end_to_end_ms"]["count"] == 3 for one in found["comparisons"])
    assert "orchestrator and target" in done.out
    assert "added to in process" in done.out


class Instant:
    """A client whose server answers at once, with two chunks of four tokens each."""

    chats = True

    async def stream(self, request: Request) -> Pieces:
        yield Chunk()
        yield Chunk()
        yield FIGURES


@dataclass(frozen=True)
class InMemory:
    """Two stages of two configurations, one of which is measured beside the other."""

    delays: tuple[float, ...] = (0.0, 5.0)
    clients: Mapping[str, LoadClient] = field(default_factory=lambda: {"HTTP": Instant(), "in process": Instant()})

    async def stages(self) -> Stages:
        for delay in self.delays:
            yield delay, self.clients


def run(tested: InMemory, file: ReportFile) -> None:
    load = LoadOptions(clients=2, requests=3, repeat=2)
    test = LoadTest(load, (Prompt("text", "a"),), generate_of(LoadRequests()), file)
    run_to_end(test.run(tested.stages(), LoadReport(CONDITIONS)))


def test_stages_are_measured_compared_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    run(InMemory(), ReportFile(json_file=report))
    found = validated(json.loads(report.read_text()))
    names = [(one["way"], one["delay_ms"]) for one in found["runs"]]
    assert names == [("HTTP", 0), ("in process", 0), ("HTTP", 5), ("in process", 5)]
    assert [one["summary"]["requests"] for one in found["runs"]] == [6] * 4
    assert [(one["way"], one["delay_ms"]) for one in found["comparisons"]] == [("HTTP", 0), ("HTTP", 5)]
    assert "orchestrator and target" in capsys.readouterr().out


class Refusing:
    """A client whose server refuses all requests but the first `answered`."""

    chats = True

    def __init__(self, answered: int) -> None:
        self.answered = answered

    async def stream(self, request: Request) -> Pieces:
        self.answered -= 1
        if self.answered < 0:
            raise RequestFailedError("HTTP 429", "no room")
        yield Chunk()
        yield FIGURES


@pytest.mark.parametrize(
    ("answered", "complaint"), [(0, "the first requests failed .HTTP 429.: no room"), (1, "no request was answered")]
)
def test_a_test_without_an_answer_fails(answered: int, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommandFailed, match=complaint):
        run(InMemory((0.0,), clients={"HTTP": Refusing(answered)}), ReportFile())
    assert ("HTTP 429: no room" in capsys.readouterr().err) == (answered == 1)


def assert_measured(found: dict[str, Any]) -> None:
    """Every figure is there, and a drafter, which short outputs may not want, is as far away as was asked for."""
    summary = found["summary"]
    assert (summary["requests"], summary["errors"], summary["tokens"]) == (3, {}, 24)
    assert all(summary[name]["count"] > 0 for name in LATENCIES)
    assert (summary["front_ms"] is None) == (found["way"] == "in process")
    assert summary["tokens_per_pass"] >= 1
    assert summary["between_chunks_ms"]["count"] == 3 * 7
    target, *drafters = summary["hops"]
    assert [target["role"], *(one["role"] for one in drafters)] in (["target"], ["target", "drafter"])
    assert target["questions"] >= 3
    assert [one for one in drafters if one["questions"] and one["wire_ms"] < 2 * DELAY] == []  # it may not be asked
    assert target["bytes_per_token"] > 0
    assert 0 < target["model_share"] <= 1
    assert 0 <= target["idle_share"] < 1
    assert target["serialization_ms_per_token"] > 0


def test_a_server_that_is_not_there(cli: Cli) -> None:
    for address in (("--url", "http://127.0.0.1:9"), ("--server", "127.0.0.1:9")):
        cli("loadtest", *address, "--requests", 1).failed("the first requests failed", 1)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--clients", "0"], "--clients must be "),
        (["--requests", "0"], "--requests must be "),
        (["--seed", "-1"], "--seed must be "),
        (["--timeout", "0"], "--timeout must be "),
        (["--max-tokens", "0"], "--max-tokens must be "),
        (["--method", "nonsense"], "nonsense"),
        (["--temperature", "-1"], "temperature"),
        (["--delay-ms", "a"], "--delay-ms takes numbers"),
        (["--pace-target", "fast"], "a pace is A,B"),
        (["--prompts", "/nowhere"], "cannot read the prompts"),
        (["--json", "/nowhere/report.json"], "cannot write /nowhere/report.json"),
        (["--url", "nowhere"], "--url must be such as"),
        (["--server", "nowhere"], "--server must be HOST:PORT"),
        (
            ["--server", "127.0.0.1:9", "--compare"],
            "--compare and --delay-ms need services that this command starts: leave out --url",
        ),
        (
            ["--target", "127.0.0.1:9", "--delay-ms", "0"],
            "--compare and --delay-ms need services that this command starts: leave out --url",
        ),
        (["--drafter", "127.0.0.1:9"], "--drafter has an address and --target has none"),
    ],
)
def test_wrong_options(cli: Cli, options: list[str], complaint: str) -> None:
    cli("loadtest", *options).failed(complaint)
