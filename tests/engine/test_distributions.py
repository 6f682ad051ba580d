"""Distributions against transformers' own processors, rows against distributions."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList

from crossdraft.engine.device import fetched
from crossdraft.engine.sampling import distributions as distributions_module
from crossdraft.engine.sampling.distributions import Columns, History, RowTable, Warping, distributions, row_table
from crossdraft.types.messages import SamplingOptions
from tests.engine.tiny import drafting_distributions, nodes
from tests.verification.toys import row_of

SIZE = 50
LOGITS = torch.randn(6, SIZE, generator=torch.Generator().manual_seed(3)) * 3
PROMPT = (1, 2, 3, 3)
HISTORY = History((4, 5), [(), (6,), (6, 7), (1,), (8, 9), (4, 4)])
PAST = [(*PROMPT, *HISTORY.output, *path) for path in HISTORY.paths]
ALLOWED, WORDS, ENDS = (0, 4, 6, 7, 9, 11, 30), ((6,), (4, 5, 6), (6, 7, 9), (4, 4), (5, 8, 9, 0)), (7, 11)
short = st.lists(st.integers(0, 2), max_size=6).map(tuple)


def distribution(
    logits: torch.Tensor, options: SamplingOptions, history: History | None = None, prompt: tuple[int, ...] = PROMPT
) -> torch.Tensor:
    """What is drawn from after each row, float64 (n, V)."""
    return distributions([nodes(logits, options, history, prompt)])


def processors(options: SamplingOptions) -> LogitsProcessorList:
    """What transformers' generate would build, but in vLLM's order: there `min_p` comes before `top_k` and `top_p`."""
    chain = LogitsProcessorList()
    if options.logit_bias:
        biases = {(token,): float(bias) for token, bias in options.logit_bias}
        chain.append(transformers.SequenceBiasLogitsProcessor(biases))
    if options.repetition_penalty != 1:
        chain.append(transformers.RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    if options.temperature != 1:
        chain.append(transformers.TemperatureLogitsWarper(options.temperature))
    if options.min_p:
        chain.append(transformers.MinPLogitsWarper(options.min_p))
    if options.top_k:
        chain.append(transformers.TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        chain.append(transformers.TopPLogitsWarper(options.top_p))
    return chain


BIAS = ((6, 2.5), (40, -100.0))
EVERY = itertools.product((1.0, 0.6), (0, 1, 7, 80), (1.0, 0.8), (0.0, 0.1), (1.0, 1.4, 0.7), ((), BIAS))
SOME = [  # temperature, top_k, top_p, min_p, repetition penalty, biases
    (1.0, 0, 1.0, 0.0, 1.0, ()),
    (0.6, 1, 1.0, 0.1, 0.7, ()),
    (1.0, 7, 0.8, 0.0, 1.4, BIAS),
    (0.6, 80, 0.8, 0.1, 1.0, BIAS),
    (0.6, 7, 1.0, 0.1, 1.4, ()),
    (1.0, 0, 0.8, 0.1, 0.7, BIAS),
]


def rows_of(probabilities: torch.Tensor, head: int, listed: Sequence[np.ndarray] = ()) -> RowTable:
    return fetched(row_table(probabilities, head, listed))


@pytest.mark.parametrize("settings", [*SOME, *(pytest.param(each, marks=pytest.mark.full) for each in EVERY)])
def test_distributions_are_those_of_transformers(settings: tuple) -> None:
    *numbers, logit_bias = settings
    options = SamplingOptions(*numbers, logit_bias=logit_bias)
    found = distribution(LOGITS, options, HISTORY)
    assert found.dtype == torch.float64
    for row, past in enumerate(PAST):
        scores = processors(options)(torch.tensor([past]), LOGITS[row : row + 1])
        torch.testing.assert_close(found[row].float(), scores.softmax(-1)[0], atol=1e-6, rtol=1e-4)
        assert torch.equal(found[row] > 0, torch.isfinite(scores[0]))


@pytest.mark.parametrize("settings", SOME)
def test_a_grammars_mask_comes_before_all_else(settings: tuple) -> None:
    """Masked logits are the model's from then on: penalties, biases and truncations see what is left, as in vLLM."""
    *numbers, logit_bias = settings
    options = SamplingOptions(*numbers, logit_bias=logit_bias)
    allowed = np.random.default_rng(5).random(LOGITS.shape) < 0.3
    allowed[:, 3] = True
    free = nodes(LOGITS, options, HISTORY, PROMPT)
    kept = replace(free, mask=np.packbits(allowed, axis=1, bitorder="little"))
    assert torch.equal(distributions([free, kept])[: len(LOGITS)], distributions([free]))
    for parts in ([kept], [free, kept]):  # alone, and with one that has no grammar
        found = distributions(parts)[-len(LOGITS) :]
        for row, past in enumerate(PAST):
            logits = LOGITS[row : row + 1].masked_fill(~torch.from_numpy(allowed[row]), -torch.inf)
            scores = processors(options)(torch.tensor([past]), logits)
            torch.testing.assert_close(found[row].float(), scores.softmax(-1)[0], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("spread", "top_p"), [(0.1, 0.97), (1.0, 0.5), (4.0, 0.9), (4.0, 1e-9)])
def test_top_p_of_large_vocabularies(spread: float, top_p: float) -> None:
    """Where few ids hold the mass, and where nearly all are needed."""
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(4), dtype=torch.float64) * spread
    scores = transformers.TopPLogitsWarper(top_p)(torch.zeros(3, 1, dtype=torch.int64), logits)
    found = distribution(logits, SamplingOptions(top_p=top_p))
    assert torch.equal(found > 0, torch.isfinite(scores))
    torch.testing.assert_close(found, scores.softmax(-1))


def test_a_frequency_penalty_is_subtracted_for_each_time_and_a_presence_penalty_once() -> None:
    options = SamplingOptions(repetition_penalty=1.2, presence_penalty=-0.4, frequency_penalty=0.7)
    for row, (path, past) in enumerate(zip(HISTORY.paths, PAST, strict=True)):
        scores = processors(options)(torch.tensor([past]), LOGITS[row : row + 1].double())[0]
        for token in (*HISTORY.output, *path):
            scores[token] -= 0.7
        scores[list({*HISTORY.output, *path})] += 0.4
        torch.testing.assert_close(distribution(LOGITS, options, HISTORY)[row], scores.softmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("min_tokens", [0, 3, 4])
def test_bans_are_those_of_transformers(temperature: float, min_tokens: int) -> None:
    bans = {"allowed_token_ids": ALLOWED, "bad_word_ids": WORDS, "min_tokens": min_tokens, "end_ids": ENDS}
    options = SamplingOptions(temperature, top_k=4, repetition_penalty=1.3, **bans)
    chain = processors(replace(options, temperature=temperature or 1.0, top_k=0))
    chain.append(transformers.SuppressTokensLogitsProcessor([token for token in range(SIZE) if token not in ALLOWED]))
    chain.append(transformers.NoBadWordsLogitsProcessor([list(word) for word in WORDS]))
    chain.append(transformers.MinNewTokensLengthLogitsProcessor(len(PROMPT), min_tokens, list(ENDS)))
    chain.append(transformers.TopKLogitsWarper(4))
    found = distribution(LOGITS, options, HISTORY)
    for row, past in enumerate(PAST):
        scores = chain(torch.tensor([past]), LOGITS[row : row + 1])[0]
        due = scores.softmax(-1) if temperature else torch.eye(SIZE)[scores.argmax()]
        torch.testing.assert_close(found[row].float(), due, atol=1e-6, rtol=1e-4)
        assert torch.equal(found[row] > 0, due > 0)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple), max_size=12), short, short)
def test_bad_words_are_those_whose_beginning_a_text_ends_with(words, output, path) -> None:
    text, options = (*output, *path), SamplingOptions(bad_word_ids=tuple(words))
    due = {word[-1] for word in words if text[max(0, len(text) - len(word) + 1) :] == word[:-1]}
    found = distribution(torch.zeros(1, 4), options, History(output, [path]))[0]
    assert {token for token in range(4) if found[token] == 0} == due


def test_a_bad_word_does_not_begin_in_the_prompt() -> None:
    """As in vLLM; transformers looks at the prompt as well."""
    found = distribution(LOGITS[:1], SamplingOptions(bad_word_ids=((3, 8), (3,))), History((), [()]), (3,))
    assert (found[0, 3], bool(found[0, 8] > 0)) == (0, True)


def test_tiny_temperatures_do_not_overflow() -> None:
    tiny, none = (distribution(LOGITS, SamplingOptions(temperature)) for temperature in (1e-300, 0))
    assert torch.equal(tiny, none)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="names id 50, and ids are 0 to 49"):
        distribution(LOGITS, SamplingOptions(logit_bias=((50, 1.0),)))
    with pytest.raises(ValueError, match="pass their history"):
        distribution(LOGITS, SamplingOptions(presence_penalty=1))
    with pytest.raises(ValueError, match="share no token"):
        drafting_distributions(LOGITS, SamplingOptions(), 8, Columns.of(np.arange(0), LOGITS.device))


def test_a_row_has_the_head_the_listed_ids_and_the_rest_as_tail() -> None:
    shares = distribution(LOGITS, SamplingOptions())
    listed = [np.array([0, 1]), np.array([], dtype=np.int64), *(shares.topk(3).indices.numpy()[2:])]
    for row, probabilities, wanted in zip(rows_of(shares, 5, listed).nodes(), shares.numpy(), listed, strict=True):
        best = set(np.argsort(-probabilities)[:5].tolist())
        assert set(row.ids.tolist()) == best | set(wanted.tolist())
        assert len(set(row.ids.tolist())) == len(row.ids)
        np.testing.assert_array_equal(row.probabilities, probabilities[row.ids])
        assert row.tail == pytest.approx(1 - row.probabilities.sum())
        assert not row.whole


def test_a_row_is_whole_when_nothing_possible_is_missing() -> None:
    shares = distribution(LOGITS, SamplingOptions(top_k=4))
    assert all(row.whole and len(row.ids) == 4 for row in rows_of(shares, 64).nodes())
    assert all(row.whole for row in rows_of(distribution(LOGITS, SamplingOptions()), SIZE).nodes())
    missing = int(shares[0].argmin())
    (row,) = rows_of(shares[:1], 3, [np.array([missing])]).nodes()
    assert not row.whole
    assert row.probability(missing) == 0


def test_a_tail_is_what_the_unlisted_ids_hold() -> None:
    """One minus the listed ones would be 2.2e-16 of rounding, or none, whatever is there."""
    shares = torch.tensor([1 / 3, 1 / 3, 1 / 3 - 1e-17], dtype=torch.float64)
    for rest, tail in ((1e-30, 2e-30), (1e-44, 2e-44), (1e-60, 0.0)):  # float32 ends at 1.4e-45
        every = torch.cat([shares, torch.tensor([rest, rest], dtype=torch.float64)])[None]
        (row,) = rows_of(every, 3).nodes()
        assert row.tail == pytest.approx(tail, abs=0)
        assert rows_of(every, 3, [np.array([3])]).nodes()[0].tail == pytest.approx(tail / 2, abs=0)


def test_a_drafting_distribution_survives_the_wire_bit_by_bit() -> None:
    for ids, weights in drafting_distributions(LOGITS, SamplingOptions(temperature=0.8), 12):
        assert len(ids) == 12
        assert weights.sum() == 1.0
        received = row_of(ids, weights.astype(np.float32).astype(np.float64))
        np.testing.assert_array_equal(received.probabilities, weights)
        assert received.whole


def test_a_drafting_distribution_is_masked_first_and_then_truncated() -> None:
    allowed = np.arange(0, SIZE, 3)
    columns = Columns.of(allowed, LOGITS.device)
    options = SamplingOptions(temperature=0.7, top_p=0.9)
    masked = torch.full_like(LOGITS, -torch.inf)
    masked[:, allowed] = LOGITS[:, allowed]
    reference = distribution(masked, options)
    for (ids, weights), expected in zip(drafting_distributions(LOGITS, options, 0, columns), reference, strict=True):
        np.testing.assert_allclose(weights, expected[torch.from_numpy(ids)], rtol=1e-12)
        assert set(ids.tolist()) == set(expected.nonzero()[:, 0].tolist())
    for (ids, weights), expected in zip(drafting_distributions(LOGITS, options, 3, columns), reference, strict=True):
        best = expected.topk(3)
        assert ids.tolist() == best.indices[best.values > 0].tolist()
        np.testing.assert_allclose(weights, (best.values / best.values.sum())[: len(ids)], atol=1e-6)


@given(
    st.builds(
        SamplingOptions,
        st.sampled_from([0, 0.3, 1, 2]),
        st.integers(0, SIZE + 5),
        st.sampled_from([1.0, 0.9, 0.3]),
        st.sampled_from([0.0, 0.02, 0.3]),
    ),
    st.integers(1, SIZE),
    st.integers(0, 999),
)
def test_what_a_drafter_draws_from_is_the_distribution_cut(options: SamplingOptions, row_width: int, seed: int) -> None:
    """Whatever it is narrowed to: the most probable ids by `tempered`, as multiples of 2^-24."""
    logits = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    warping = Warping.of([options], [len(logits)], logits.device)
    best = distributions_module.tempered(logits, warping).topk(row_width)
    expected = torch.zeros(logits.shape, dtype=torch.float64).scatter_(-1, best.indices, best.values)
    for width in {0, warping.width}:
        weights, columns = distributions_module.cut_distributions(logits, replace(warping, width=width), row_width)
        found = torch.zeros_like(expected).scatter_(-1, columns, weights)
        np.testing.assert_allclose(found, expected / expected.sum(-1, keepdim=True), atol=row_width * 2.0**-24)
        assert weights.sum(-1).tolist() == [1.0] * len(logits)


def test_penalties_and_biases_are_not_the_drafters() -> None:
    options = SamplingOptions(presence_penalty=2, repetition_penalty=2, logit_bias=((0, 99.0),))
    found, due = (drafting_distributions(LOGITS, each, 4) for each in (options, SamplingOptions()))
    for (ids, weights), (plain_ids, plain) in zip(found, due, strict=True):
        np.testing.assert_array_equal(ids, plain_ids)
        np.testing.assert_array_equal(weights, plain)
