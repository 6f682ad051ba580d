"""`crossdraft audit` before a real server with the bundled models, and what it refuses."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from crossdraft.audit.checks import AuditPlan, Result
from crossdraft.cli.audit import FEW_DRAFTED, Report, run, verdict_of
from crossdraft.cli.generate import named
from crossdraft.cli.running import PROMPTS, CommandFailed
from crossdraft.config.commands import AuditedEndpoint, AuditOptions, AuditReference
from crossdraft.serving.backend import LocalBackend, LocalModel, LocalOptions, NamedDrafter
from crossdraft.serving.http.middleware import HttpOptions
from crossdraft.serving.metrics import MeasuredBackend, Metrics
from tests.cli.conftest import Cli
from tests.endtoend.stack import serving
from tests.serving.http.conftest import front

SMALL: dict[str, Any] = {"greedy": 2, "greedy_tokens": 8, "sampled": 2, "samples": 32, "tokens": 3, "level": 1e-6}
UNDRAFTED = '{"speculative": {"drafter": "none"}}'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url() -> AsyncIterator[str]:
    """Of a server with the bundled target and a drafter of another vocabulary."""
    async with AsyncExitStack() as exits:
        stack = await exits.enter_async_context(serving(("drafter-b",), ()))
        model = LocalModel("demo", (stack.target,), (NamedDrafter("b", (stack.drafters["drafter-b"],)),), ())
        backend = await exits.enter_async_context(LocalBackend(model, LocalOptions(64)))
        metrics = Metrics()
        measured = front(MeasuredBackend(backend, metrics), HttpOptions(metrics=metrics.text))
        served = await exits.enter_async_context(measured)
        yield f"http://{served.server.address}"


async def audit(url: str, file: Path, extra: dict[str, Any], reference: bool = False, **plan: Any) -> None:
    options = AuditOptions(json_file=file, **{"tolerance": 0.01, "timeout": 600.0} | SMALL | plan)
    beside = AuditReference(reference_url=url, reference_body=UNDRAFTED) if reference else AuditReference()
    audited = AuditedEndpoint(url=url, extra_body=json.dumps(extra))
    await run(AuditPlan(**named(AuditPlan, vars(options) | {"prompts": PROMPTS})), audited, beside, options)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("method", ["coupled", "seeded"])
async def test_nothing_is_wrong_with_exact_methods(url, method, tmp_path, capsys):
    file = tmp_path / "report.json"
    await audit(url, file, {"speculative": {"method": method, "overlap": "off"}}, reference=True)
    shown = capsys.readouterr().out
    assert "demo at http://127.0.0.1" in shown
    assert "FAULT" not in shown
    drafted = re.search(r"Draft tokens meanwhile: ([1-9][0-9,]*), accepted [1-9]", shown)
    assert drafted
    few = int(drafted[1].replace(",", "")) < FEW_DRAFTED
    last = shown.splitlines()[-1]
    assert last.startswith("No fault was found in what was checked")
    assert ("speculation was hardly tested" in last) == few
    found = json.loads(file.read_text())
    assert found["faults"] == []
    assert found["draft_tokens"][0] > found["draft_tokens"][1] > 0
    assert found["plan"]["samples"] == 32
    assert found["requests"] >= found["planned"]
    assert {one["name"] for one in found["result"]["checks"]} >= {"greedy text, against the reference", "temperature"}


@pytest.mark.parametrize(
    ("drafted", "said"),
    [
        ((41, 12), "No fault was found in what was checked, but with 41 draft tokens speculation was hardly tested"),
        ((FEW_DRAFTED, 1), "No fault was found in what was checked."),
        (None, "No fault was found in what was checked; the server does not say whether it drafted meanwhile."),
    ],
)
def test_the_verdict_says_whether_speculation_was_tested(drafted: tuple[int, int] | None, said: str) -> None:
    plan = AuditPlan(PROMPTS, tolerance=0.01, **SMALL)
    counts = ("", "", "", "", "", 0, "", plan, 1, 1, 0)
    assert verdict_of(Report(*counts, drafted, Result((), (), (), (), None))).startswith(said)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_planted_fault_ends_the_command_with_1(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The server is told another temperature than the audit believes."""
    with pytest.raises(CommandFailed, match=r"faults were found: .*temperature") as raised:
        await audit(url, tmp_path / "report.json", {"temperature": 1.6}, greedy=0, samples=64)
    assert raised.value.exit_code == 1
    assert "a temperature of +" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("extra", "faults"),
    [
        ({"speculative": {"method": "coupled", "overlap": "off"}}, []),
        ({"speculative": {"method": "seeded", "overlap": "off"}}, []),
        ({"temperature": 1.02}, ["temperature"]),
    ],
    ids=["coupled", "seeded", "two percent"],
)
async def test_a_large_sample(url: str, tmp_path: Path, extra: dict[str, Any], faults: list[str]) -> None:
    """A temperature off by two percent is found at the sample size at which that is stated."""
    file = tmp_path / "report.json"
    with suppress(CommandFailed):
        await audit(url, file, extra, greedy=0, sampled=3, samples=1_900, tokens=8, level=0.001)
    found = json.loads(file.read_text())
    assert found["faults"] == faults
    assert found["result"]["power"]["temperature"] < 0.02


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--url", "nowhere"), "--url must be such as http://127.0.0.1:8000, got nowhere"),
        (("--reference-url", "nowhere"), "--reference-url must be such as"),
        (("--reference-url", "http://a", "--model", "bundled:target"), "are two references: give one of them"),
        (("--extra-body", "{"), "--extra-body must be a JSON object"),
        (("--extra-body", "[" * 100_000), "--extra-body must be a JSON object"),
        (("--reference-body", "[1]"), "--reference-body must be a JSON object"),
        (("--reference-body", '{"user": "me"}'), "--reference-body needs a reference: give --reference-url or --model"),
        (("--greedy", 0, "--samples", 0), "nothing is checked"),
        (("--level", 1), "--level must be between 0 and 1"),
        (("--greedy", 100), "100 prompts are to be used and there are 42: give --prompts FILE"),
        ((), "cannot connect to http://127.0.0.1:1"),
        (("--api-key", "é" * 16), "an API key has visible ASCII characters only, and no spaces; check --api-key"),
    ],
)
def test_what_is_refused(cli: Cli, options: tuple[object, ...], complaint: str) -> None:
    cli("audit", "--url", "http://127.0.0.1:1", *options).failed(complaint)
