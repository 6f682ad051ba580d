"""Sampled output through gRPC has the target's own distribution, whatever drafts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from crossdraft.audit.statistics import Fit, fit_of
from crossdraft.client import GenerationRequest
from crossdraft.config.request import METHODS
from crossdraft.types.rows import Probabilities
from crossdraft.verification.methods import method_named
from tests.conftest import FULL
from tests.endtoend.reference import Reference
from tests.endtoend.stack import EAGLE, ROUNDS, TARGET, statistics

PROMPT = "for i in range("
TOKENS = 2  # of a continuation
FIRST_TOKENS = 5  # the most frequent ones, after which the second token is tested
LEAST_P = 1e-4  # a smaller p is not taken for chance
TREES = {"overlap": "off", "tree_nodes": 16}
AHEAD = {"overlap": "on", "max_draft_tokens": 4, "min_draft_tokens": 1, "branches": 2, "branch_width": 2, "paths": 4}
OWN = {"drafter_temperature": 0.7}  # of the target's own model: at the target's, nothing would be refused
DRAFTERS = {"standard": TARGET, "slrs": "drafter-c"}  # of the others: drafter-b
CASES = [
    ("coupled", "drafter-b", AHEAD),
    ("standard", EAGLE, ROUNDS),
    pytest.param("seeded", EAGLE, TREES, marks=pytest.mark.full),
    *(
        pytest.param(
            name, DRAFTERS.get(name, "drafter-b"), ROUNDS | (OWN if name == "standard" else {}), marks=pytest.mark.full
        )
        for name in METHODS
        if method_named(name).exact
    ),
]
COUNT, LEAST_TESTS = (4_000, 4) if FULL else (300, 2)
SERVED = ("drafter-b", EAGLE, *(("drafter-c", TARGET) if FULL else ()))
AFFINE = ("drafter-b",) if FULL else ()
pytestmark = pytest.mark.asyncio(loop_scope="module")


def fits(target: Reference, drawn: Sequence[Sequence[int]]) -> list[Fit]:
    """Of the first token, and of the second one after each of the most frequent first ones, unless it is too rare."""

    def after(*ids: int) -> Probabilities:
        law: Probabilities = target.log_probabilities([*target.encode(PROMPT), *ids])[-1].double().exp().numpy()
        return law

    first = Counter(ids[0] for ids in drawn)
    found = [fit_of(first, after())]
    for token, _ in first.most_common(FIRST_TOKENS):
        second = Counter(ids[1] for ids in drawn if ids[0] == token and len(ids) > 1)
        found += [fit_of(second, after(token))] if second else []
    return [fit for fit in found if fit is not None]


@pytest.mark.usefixtures("drafter_first")
@pytest.mark.parametrize(("method", "drafter", "settings"), CASES)
async def test_the_first_two_tokens(stack, reference, method, drafter, settings):
    request = GenerationRequest(
        PROMPT, method=method, num_speculative_tokens=2, max_tokens=TOKENS, ignore_eos=True, **settings
    )
    keyed = method_named(method).keyed  # a seed is then all that differs
    for last in (False, True):  # each draw has some tests: what is right fails in one draw of a thousand, not in two
        requests = [replace(request, seed=last * COUNT + number) if keyed else request for number in range(COUNT)]
        generations = await stack.run(drafter, requests)
        figures = [statistics(generation) for generation in generations]
        assert sum(figure.accepted for figure in figures)
        assert sum(figure.corrected for figure in figures)
        found = fits(reference, [generation.ids for generation in generations])
        assert len(found) >= LEAST_TESTS
        if all(fit.p > LEAST_P for fit in found):
            return
        assert not last, found
