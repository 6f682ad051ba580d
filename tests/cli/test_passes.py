"""`crossdraft bench speculation`, `trees` and `overhead`: what is asked for, how it is summed up, what is refused."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from crossdraft.bench.acceptance import SHAPES
from crossdraft.bench.made_up import DrafterSession, Guesser, World
from crossdraft.bench.overlap import Served
from crossdraft.bench.speculation import WAYS, Plan, Run, Way, measured
from crossdraft.client import GenerationRequest, Overlap
from crossdraft.drafter.conversation import Epoch
from crossdraft.text.letters import NOTHING, Letters
from crossdraft.types.messages import Draft, Drafted, NoiseKey
from crossdraft.types.rows import DraftToken, Whose
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.methods import method_named
from tests.cli.conftest import Cli
from tests.cli.test_bench import figures

PROMPTS = Path(__file__).parents[1] / "prompts.jsonl"
PLAN = Plan(Served("t"), Served("d"), (0.0,), (0.0,), ("one", "two"), 32, 16, 4)


def run(text: str, seconds: float, *busy: float) -> Run:
    return Run(30, seconds, text, figures(tokens=30, passes=10, speculated=3), busy)


def test_targets_are_compared_with_one_that_runs_in_the_same_way() -> None:
    runs = {way: [run("a", 4.0, 3.0), run("b", 4.0, 2.0)] for way in WAYS}
    both = Way(2, speculation=True, governed=True)
    runs[both] = [run("a", 2.0, 1.0, 1.5), run("x", 2.0, 1.0, 0.5)]
    found = measured(0.5, 5.0, both, runs)
    assert (found.ratio.value, found.idle) == (2.0, (0.5, 0.5))
    assert (found.equal, found.texts, found.speculated, found.passes) == (1, 2, 6, 20)


def test_each_way_is_asked_for_what_it_says() -> None:
    asked = {way: PLAN.request(way, 1) for way in WAYS}
    assert {(way.governed, request.overlap) for way, request in asked.items()} == {
        (True, Overlap.AUTO),
        (False, Overlap.ON),
    }
    for way, request in asked.items():
        assert (request.prompt, request.choice, request.speculation) == ("two", 1, way.speculation)
        assert (request.window, request.wait) == ((None, None) if way.governed else (16, 4))


def test_trees_have_more_paths_and_branches_only_where_there_is_overlap() -> None:
    requests = [shape.request(GenerationRequest("x", "coupled", overlap=Overlap.OFF)) for shape in SHAPES]
    assert [request.paths for request in requests] == [1, 2, 1, 2, 2, 6]
    assert [bool(request.branches) for request in requests] == [False] * 4 + [True] * 2


@pytest.mark.parametrize("name", ["coupled", "slem"])
async def test_a_branch_of_an_imagined_drafter_is_adopted(name: str) -> None:
    """Where rows are sent its draft tokens come again, else what follows them."""
    world = World.of(method_named(name), 2000, 0.0)
    guesser = Guesser(
        world.language, world.noises, world.method, 16, NoiseKey(0), RandomChooser(np.random.default_rng(0))
    )
    session = DrafterSession(guesser, 0.0)
    sent: list[Drafted] = []
    first = Epoch(Draft(1, 0, NOTHING, 4, chunk=1, branch_depth=2))
    session.begin(first)
    await asyncio.wait_for(session.draft(first, sent.append), 30)
    assert [len(one.draft_tokens) for one in sent] == [1, 1, 1, 1]
    branch = next(branch for one in sent for branch in one.branches)
    assert len(branch.tokens) == 2
    sent.clear()
    drafted = guesser.letters_of(DraftToken(branch.tokens[0], None, Whose.DRAFTER))
    second = Epoch(Draft(2, branch.offset, branch.letters, 3, adopt=branch.number))
    session.begin(second)
    await asyncio.wait_for(session.draft(second, sent.append), 30)
    draft_tokens = [draft_token.token for one in sent for draft_token in one.draft_tokens]
    if world.method.drafter_rows:
        assert (sent[0].first, draft_tokens[:2]) == (0, list(branch.tokens))
    else:
        assert (sent[0].first, len(draft_tokens)) == (2, 1)
    assert session.text.startswith(Letters(branch.letters + drafted), branch.offset)


def test_what_the_orchestrator_costs(cli: Cli, tmp_path: Path) -> None:
    file, profile = tmp_path / "costs.json", tmp_path / "profile.txt"
    outcome = cli(
        *("bench", "overhead", "--method", "slem", "--size", 2000, "--tokens", 24, "--outputs", 1),
        *("--pass-ms", 2, "--draft-token-ms", 0, "--json", file, "--profile", profile),
    )
    assert outcome.code == 0, outcome.err
    costs = json.loads(file.read_text())["costs"]
    assert [(one["way"]["overlap"], one["way"]["branches"]) for one in costs] == [(False, 0), (True, 0), (True, 4)]
    for one in costs:
        assert 0 < one["session_ms"] < one["loop_ms"] <= one["cpu_ms"]
        assert one["bytes_per_token"] == pytest.approx(one["target_bytes"] + one["drafter_bytes"])
    assert "crossdraft/pipeline/" in profile.read_text()


def test_a_method_that_needs_a_model_is_refused(cli: Cli) -> None:
    outcome = cli("bench", "overhead", "--method", "slrs", "--size", 2000)
    assert outcome.code == 2
    assert "slrs needs a drafter's model" in outcome.err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("speculation", "--wait", 9, "--window", 4), "wait must be at most window"),
        (("trees", "-k", 0), "k must be between"),
        (("trees", "--method", "none"), "none"),
    ],
)
def test_what_means_nothing_is_refused(cli: Cli, options: tuple[str, ...], complaint: str) -> None:
    outcome = cli("bench", *options, "--prompts", PROMPTS)
    assert outcome.code == 2
    assert complaint in outcome.err
