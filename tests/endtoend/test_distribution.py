"""Sampled output through gRPC has the target's own distribution, whatever drafts."""

import os
from typing import Any

import pytest

from crossdraft.client import GenerationRequest
from crossdraft.lab.acceptance import LEAST_P, TOKENS, DistributionCheck, Drawn
from tests.endtoend.stack import EAGLE, TARGET, Stack, statistics

PROMPT = "for i in range("
FULL = "CROSSDRAFT_FULL_TESTS" in os.environ
ROUNDS = {"overlap": "off"}
TREES = {"overlap": "off", "tree_nodes": 16}
AHEAD = {"overlap": "on", "max_draft_tokens": 4, "min_draft_tokens": 1, "branches": 2, "branch_width": 2, "paths": 4}
CASES = [
    ("coupled", "drafter-b", AHEAD),
    ("standard", EAGLE, ROUNDS),
    pytest.param("seeded", EAGLE, TREES, marks=pytest.mark.full),
    pytest.param("coupled", "drafter-b", ROUNDS, marks=pytest.mark.full),
    pytest.param("slrs", "drafter-c", ROUNDS, marks=pytest.mark.full),
]  # `crossdraft.lab.acceptance` has all methods
COUNT, LEAST_TESTS = (20_000, 4) if FULL else (300, 2)
SERVED = ("drafter-b", EAGLE, *(("drafter-c",) if FULL else ()))
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def trial() -> DistributionCheck:
    return DistributionCheck(f"bundled:{TARGET}", PROMPT)


@pytest.mark.usefixtures("drafter_first")
@pytest.mark.parametrize(("method", "drafter", "settings"), CASES)
async def test_the_first_two_tokens(
    stack: Stack, trial: DistributionCheck, method: str, drafter: str, settings: dict[str, Any]
) -> None:
    request = GenerationRequest(
        PROMPT, method=method, num_speculative_tokens=2, max_tokens=TOKENS, ignore_eos=True, **settings
    )
    for last in (False, True):  # each draw has some tests: what is right fails in one draw of a thousand, not in two
        generations = await stack.run(drafter, COUNT * [request])
        figures = [statistics(generation) for generation in generations]
        assert sum(figure.accepted for figure in figures)
        assert sum(figure.corrected for figure in figures)
        drawn = [tuple(generation.ids) for generation in generations]
        tests = trial.tests(Drawn(method, drafter, drawn, acceptance=None, exact=True))
        assert len(tests) >= LEAST_TESTS
        if all(test.fit.p > LEAST_P for test in tests):
            return
        assert not last, tests
