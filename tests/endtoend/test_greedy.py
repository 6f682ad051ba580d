"""Greedy output through gRPC, with every method and drafter, is that of transformers' `generate`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from transformers import AutoConfig, PreTrainedTokenizerBase

from crossdraft.client import GenerationRequest, Overlap
from crossdraft.engine.eagle.engine import EagleEngine
from crossdraft.engine.names import BUNDLED
from crossdraft.session.target_side import TargetSide
from crossdraft.types.messages import HiddenStates, SamplingOptions
from crossdraft.types.statistics import Statistics
from crossdraft.verification.methods import METHODS
from tests import prompts
from tests.client.together import ended
from tests.conftest import FULL
from tests.endtoend.reference import GREEDY, Case, Reference, tokenizer_of
from tests.endtoend.stack import DRAFTERS, EAGLE, NGRAM, TARGET, Stack, statistics

PROMPTS = 30 if FULL else 3
NEW_TOKENS = 40 if FULL else 16
FEW = 3  # prompts for each kind of options
LONG = 800  # target tokens of a prompt that is too long for every drafter
NEARLY = 8  # tokens that are left in a drafter's context after a prompt that nearly fills it
MOST_TIES = 2  # in one test; more would not be chance
ACROSS = tuple(name for name, method in METHODS.items() if not method.same_vocabulary)
COPYING = tuple(name for name in ACROSS if not METHODS[name].shared_only)
# The last drafter's tokens are hardly ever the target's: its drafts are accepted by methods that tokenize them again.
PAIRS = tuple(
    (method, DRAFTERS[place % (len(DRAFTERS) - METHODS[method].shared_only)]) for place, method in enumerate(ACROSS)
)
SERVED, AFFINE = (TARGET, *DRAFTERS, EAGLE, NGRAM), DRAFTERS if FULL else (dict(PAIRS)["rdk"],)  # of the conftest
OVERLAPPING = tuple((method, drafter) for method, drafter in PAIRS if not METHODS[method].whole_draft)
BIASES = (("\n", -4.0), (" self", 3.0), ("(", -100.0), (" =", 1.5))  # tokens by their text
OPTIONS = {
    "biases and two penalties": replace(GREEDY, repetition_penalty=0.9, presence_penalty=2.0),
    "frequency penalty": replace(GREEDY, frequency_penalty=1.2),
    "bans": GREEDY,
    "an early end": replace(GREEDY, min_tokens=NEW_TOKENS // 2),
    "repetition penalty": replace(GREEDY, repetition_penalty=1.3),
    "presence penalty": replace(GREEDY, presence_penalty=1.5),
    "biases": GREEDY,
}
KINDS = tuple((tuple(OPTIONS)[place % len(OPTIONS)], *pair) for place, pair in enumerate(PAIRS))


def first(count: int, cases: Sequence[tuple[str, ...]]) -> list[Any]:
    """The others are repetitions, with another method or another drafter."""
    return [*cases[:count], *(pytest.param(*case, marks=pytest.mark.full) for case in cases[count:])]


IN_ROUNDS = tuple((method, drafter) for method, drafter in PAIRS if METHODS[method].whole_draft or method == "coupled")
OTHERS = tuple((method, one) for method in ACROSS for one in DRAFTERS if (method, one) not in IN_ROUNDS)
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def compared(
    stack: Stack,
    reference: Reference,
    method: str,
    drafter: str,
    cases: Sequence[Case],
    overlap: Overlap = Overlap.OFF,
    **settings: Any,
) -> list[Statistics]:
    """Generates for each case with draft tokens from the drafter, and compares; what was counted of each."""
    how = settings | {"method": method, "allow_inexact": True, "overlap": overlap}
    requests = [
        GenerationRequest(case.prompt, max_tokens=case.tokens, options=case.options, stop_token_ids=case.stops, **how)
        for case in cases
    ]
    generations = await stack.run(drafter, requests)
    assert reference.same(cases, generations).count(False) <= MOST_TIES
    figures = [statistics(generation) for generation in generations]
    assert any(figure.draft_tokens for figure in figures)
    return figures


def plain_cases() -> list[Case]:
    return [Case(text, NEW_TOKENS) for text in prompts.PROMPTS[:PROMPTS]]


@pytest.mark.parametrize(("method", "drafter"), first(len(IN_ROUNDS), [*IN_ROUNDS, *OTHERS]))
async def test_with_a_drafter_of_another_vocabulary(stack: Stack, reference: Reference, method: str, drafter: str):
    """In rounds; the next test has the other methods, whose walks are the same where a drafter drafts on."""
    figures = await compared(stack, reference, method, drafter, plain_cases())
    assert all(figure.draft_tokens for figure in figures)
    assert sum(figure.accepted for figure in figures)
    assert sum(figure.tokens for figure in figures) > sum(figure.passes - figure.row_misses for figure in figures)


@pytest.mark.usefixtures("drafter_first")
@pytest.mark.parametrize(("method", "drafter"), OVERLAPPING)
async def test_with_a_drafter_that_drafts_on(stack: Stack, reference: Reference, method: str, drafter: str) -> None:
    figures = await compared(stack, reference, method, drafter, plain_cases(), Overlap.ON)
    assert sum(figure.accepted for figure in figures)
    assert all(figure.rewinds for figure in figures)


@pytest.mark.parametrize("method", [COPYING[0], *(pytest.param(one, marks=pytest.mark.full) for one in COPYING[1:])])
async def test_with_a_drafter_that_copies(stack: Stack, reference: Reference, method: str) -> None:
    await compared(stack, reference, method, NGRAM, plain_cases())


SHAPES = {
    "chains": ("slem", Overlap.OFF, {}),
    "trees": ("slem", Overlap.OFF, {"tree_nodes": 24, "num_speculative_tokens": 5}),
    "rows": ("standard", Overlap.OFF, {}),
    "ahead": ("coupled", Overlap.ON, {"branches": 2}),
}


@pytest.mark.usefixtures("drafter_first")
@pytest.mark.parametrize("shape", SHAPES)
async def test_with_a_drafter_that_reads_hidden_states(stack: Stack, reference: Reference, shape: str) -> None:
    method, overlap, settings = SHAPES[shape]
    figures = await compared(stack, reference, method, EAGLE, plain_cases(), overlap, **settings)
    passes = sum(figure.passes - figure.row_misses for figure in figures)
    assert sum(figure.tokens for figure in figures) > (1 if overlap is Overlap.ON else 2) * passes


async def test_hidden_states_that_are_lost_change_no_text(stack, reference, monkeypatch):
    """As where a target's replies lack them; of no pass, of some, and of all."""
    made, sent, numbers, given, take = TargetSide.hidden, [], count(), [], EagleEngine.give

    def give(engine: EagleEngine, session: object, context: tuple[int, ...], states: dict[int, bytes]) -> None:
        given[-1] += len(states)
        take(engine, session, context, states)

    monkeypatch.setattr(EagleEngine, "give", give)
    for lost in (lambda: False, lambda: next(numbers) % 2 == 1, lambda: True):

        def hidden(side: TargetSide, lost: Callable[[], bool] = lost) -> HiddenStates:
            found = HiddenStates() if lost() else made(side)
            sent[-1] += len(found.places)
            return found

        sent.append(0)
        given.append(0)
        monkeypatch.setattr(TargetSide, "hidden", hidden)
        tokens = sum(figure.tokens for figure in await compared(stack, reference, "slem", EAGLE, plain_cases()))
        # The first draft leaves before any pass, and what follows the last draft is of no use.
        assert sent[-1] <= tokens
    assert sent[0] > sent[1] > sent[2] == 0
    assert [bool(one) for one in given] == [True, True, False]  # not all: a drafter may write the text in other tokens


async def test_states_of_another_width_end_the_drafting_alone(stack, reference, monkeypatch):
    monkeypatch.setattr(TargetSide, "hidden", lambda _: HiddenStates((0,), b"ab"))
    case, pipeline = plain_cases()[0], await stack.pipeline(EAGLE)
    request = GenerationRequest(case.prompt, method="slem", max_tokens=case.tokens, options=case.options, overlap="off")
    generation = await ended(pipeline.run(request))
    assert reference.check(case, generation.ids)
    assert "have 1 numbers each, and this drafter reads such of 256" in generation.statistics.drafter_lost


async def test_with_itself_as_the_drafter(stack: Stack, reference: Reference) -> None:
    figures = await compared(stack, reference, "standard", TARGET, plain_cases())
    # Not none: after a token in mid-word, the drafter tokenizes that word's beginning in its own way.
    assert sum(figure.corrected for figure in figures) <= 0.02 * sum(figure.tokens for figure in figures)
    assert sum(figure.tokens for figure in figures) > 3 * sum(figure.passes for figure in figures)


@pytest.mark.usefixtures("drafter_first")
@pytest.mark.parametrize(("kind", "method", "drafter"), first(4, KINDS))
async def test_with_penalties_and_biases(stack: Stack, reference: Reference, kind: str, method: str, drafter: str):
    options = OPTIONS[kind]
    if kind.startswith("biases"):
        options = replace(options, logit_bias=tuple((reference.encode(text)[0], bias) for text, bias in BIASES))
    cases = [replace(case, options=options) for case in plain_cases()[:FEW]]
    if kind == "bans":
        cases = [replace(case, options=bans(reference.continuation(case), reference)) for case in cases]
    if kind == "an early end":
        cases = [replace(case, stops=tuple(reference.continuation(case)[:4])) for case in cases]
    overlap = Overlap.OFF if METHODS[method].whole_draft else Overlap.ON
    for choice in {Overlap.OFF, overlap} if FULL else {overlap}:
        await compared(stack, reference, method, drafter, cases, choice)
    # The options change what is written, or nothing was tested.
    assert any(reference.continuation(case) != reference.continuation(replace(case, options=GREEDY)) for case in cases)


@pytest.mark.parametrize(("method", "drafter"), first(1, PAIRS))
async def test_with_prompts_longer_than_the_drafters_context(stack, reference, method, drafter):
    tokenizer = tokenizer_of(drafter)
    context = AutoConfig.from_pretrained(BUNDLED / drafter).max_position_embeddings
    longer, nearly = first_tokens(reference.tokenizer, LONG), first_tokens(tokenizer, context - NEARLY)
    assert len(tokenizer(longer).input_ids) > context >= len(tokenizer(nearly).input_ids) > context - 2 * NEARLY
    cases = [Case(text, NEW_TOKENS) for text in (longer, nearly)]
    for figure in await compared(stack, reference, method, drafter, cases):
        assert figure.stood_aside == 0  # the drafter goes on with the newest text


def bans(ids: Sequence[int], reference: Reference) -> SamplingOptions:
    """Half of what would be written is not allowed, and of the rest one id never, and one not after the one before."""
    size = len(reference.tokenizer)
    allowed = tuple(token for token in range(size) if token not in ids[::2])
    return replace(GREEDY, allowed_token_ids=allowed, bad_word_ids=((ids[1],), tuple(ids[3:6:2])))


def first_tokens(tokenizer: PreTrainedTokenizerBase, count: int) -> str:
    """The beginning of all prompts' text that makes this many tokens."""
    text = "".join(prompts.PROMPTS)
    ends: list[tuple[int, int]] = tokenizer(text, return_offsets_mapping=True).offset_mapping
    return text[: ends[count - 1][1]]
