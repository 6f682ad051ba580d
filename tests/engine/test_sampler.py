"""Draws, keyed noise beside the logits, and sampler requests: together they give what they give alone, bit by bit."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.drafter.sampling import Draws
from crossdraft.engine import model_thread
from crossdraft.engine.requests import ForwardRequest
from crossdraft.engine.sampling import distributions, sampler
from crossdraft.engine.sampling.clocks import Clocks, Moments
from crossdraft.engine.sampling.distributions import Columns, History, Nodes, NothingLeftError, Warping, tempered
from crossdraft.engine.sampling.paths import Paths
from crossdraft.engine.sampling.sampler import DistributionRequest, DrawRequest, RowRequest, SampleRequest, TopRequest
from crossdraft.text.letters import Letters, from_bytes
from crossdraft.types.messages import IMPOSSIBLE, NoiseKey, Sample, SamplingOptions
from crossdraft.types.rows import Row
from crossdraft.verification.noise import KeyedNoise, moment, moments, uniform_words
from tests.engine.taped import Tape
from tests.engine.test_distributions import distribution
from tests.engine.tiny import DRAWS, nodes, result

full = pytest.mark.full
SIZE = 20
NOISE = KeyedNoise([from_bytes(bytes([token])) for token in range(SIZE)], [0] * SIZE)
CLOCKS = Clocks(NOISE, torch.device("cpu"))
LOGITS = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(5))
KEY = NoiseKey(8, 1)
OFFSETS = [0, 1, 1, 5]
GREEDY = SamplingOptions(temperature=0)
SMALL = st.floats(2**-24, 1.0, width=32)
MANY = 300
MANY_NOISE = KeyedNoise([Letters(str(token // 2)) for token in range(MANY)], [token % 2 for token in range(MANY)])
CPU = torch.device("cpu")
WORDS = st.integers(0, 2**64 - 1)
MOMENTS = st.tuples(st.builds(NoiseKey, WORDS, st.integers(0, 2**32)), st.integers(0, 2**40))


def batched(requests: Sequence[sampler.SamplerRequest[Any]]) -> list[list[int]]:
    jobs: Any = [SimpleNamespace(sampling=request) for request in requests]
    return [[jobs.index(job) for job in batch] for batch in model_thread.alike(jobs)]


def draws() -> list[Draws]:
    return [Draws(NOISE, NoiseKey(8)), Draws(NOISE, None, np.random.default_rng(8))]


def sampled(options: SamplingOptions, likely: int = 0, logits: torch.Tensor = LOGITS) -> tuple[Sample, ...]:
    request = SampleRequest(nodes(logits, options, History((2,), [(3,)] * 4), (1,)), CLOCKS, KEY, OFFSETS, likely)
    (found,) = result(request)
    return found()


@pytest.mark.parametrize("options", [SamplingOptions(0.5, top_k=3), SamplingOptions(0.9, presence_penalty=1.5)])
def test_samples_are_drawn_from_the_distribution_and_priced_by_the_model(options: SamplingOptions) -> None:
    found = sampled(options)
    assert found == sampled(options)
    expected = distribution(LOGITS, options, History((2,), [(3,)] * 4), (1,))
    for sample, logits, row, offset in zip(found, LOGITS, expected, OFFSETS, strict=True):
        assert sample.token == NOISE.draw(np.arange(SIZE), row.numpy(), KEY, offset)
        assert row[sample.token] > 0
        assert sample.log_probability == pytest.approx(float(logits.log_softmax(-1)[sample.token]), abs=1e-6)


def test_the_most_probable_ids_come_along() -> None:
    for sample, logits in zip(sampled(SamplingOptions(0.5, top_k=3), 5), LOGITS, strict=True):
        values, ids = logits.log_softmax(-1).sort(descending=True)
        assert [token for token, _ in sample.likely] == ids[:5].tolist()
        assert [value for _, value in sample.likely] == pytest.approx(values[:5].tolist(), abs=1e-6)
    first, *_ = sampled(SamplingOptions(0.5, top_k=3), 999)
    assert sorted(token for token, _ in first.likely) == list(range(SIZE))


OF_LOGITS: dict[str, Callable[[torch.Tensor, SamplingOptions], sampler.SamplerRequest[Any]]] = {
    "samples": lambda logits, options: SampleRequest(nodes(logits, options), CLOCKS, KEY, OFFSETS),
    "rows": lambda logits, options: RowRequest(nodes(logits, options), 8),
    "rows of listed ids": lambda logits, options: RowRequest(nodes(logits, options), 0, [np.arange(SIZE)] * 4),
    "scores": lambda logits, options: sampler.ScoreRequest(nodes(logits, options), [1] * 4, 2),
    "distributions": lambda logits, options: DistributionRequest(logits, options, 8),
    "whole distributions": lambda logits, options: DistributionRequest(logits, options, 0),
    "top": lambda logits, options: TopRequest(logits, options, CLOCKS, [(KEY, 0)] * 4, False, 3),
    "draws": lambda logits, options: DrawRequest(logits, options, CLOCKS, [(KEY, 0)] * 4, False, 2),
    "keyed draws": lambda logits, options: DrawRequest(logits, options, CLOCKS, [(KEY, 3)] * 4, True),
}


@pytest.mark.parametrize("what", OF_LOGITS)
@pytest.mark.parametrize("options", [GREEDY, SamplingOptions(), SamplingOptions(0.7, top_k=5, top_p=0.9)])
@pytest.mark.parametrize("places", [slice(None), 7])
def test_logits_that_are_no_numbers_are_an_error(what: str, options: SamplingOptions, places: slice | int) -> None:
    logits = LOGITS.clone()
    asked = OF_LOGITS[what](logits, options)
    result(asked)
    logits[2, places] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        result(asked)


@pytest.mark.parametrize("what", ["samples", "rows"])
@pytest.mark.parametrize("options", [GREEDY, SamplingOptions()])
def test_limits_that_leave_nothing_are_told_from_logits_that_are_no_numbers(what: str, options: SamplingOptions):
    limits = replace(options, allowed_token_ids=(1,))
    mask = np.array([[0b100, *[0] * ((SIZE - 1) // 8)]] * 4, dtype=np.uint8)  # of another id
    for wrong in (None, torch.nan, torch.inf):
        logits = LOGITS.clone()
        if wrong is not None:
            logits[1] = wrong
        limited = replace(nodes(logits, limits), mask=mask)
        one = SampleRequest(limited, CLOCKS, KEY, OFFSETS) if what == "samples" else RowRequest(limited, 8)
        with pytest.raises(ValueError, match="no id is left" if wrong is None else "not finite") as failed:
            result(one)
        assert isinstance(failed.value, NothingLeftError) is (wrong is None)


@pytest.mark.parametrize("options", [GREEDY, SamplingOptions()])
def test_behind_the_first_node_a_draw_may_be_impossible(options: SamplingOptions) -> None:
    """Also where others are drawn beside it."""
    mask = np.full((4, -(-SIZE // 8)), 0xFF, dtype=np.uint8)
    (expected,) = result(SampleRequest(nodes(LOGITS, options), CLOCKS, KEY, OFFSETS))
    mask[2] = 0
    (found,) = result(SampleRequest(replace(nodes(LOGITS, options), mask=mask), CLOCKS, KEY, OFFSETS))
    assert found()[2].log_probability == IMPOSSIBLE
    assert (found()[:2], found()[3:]) == (expected()[:2], expected()[3:])


@pytest.mark.parametrize("options", [GREEDY, SamplingOptions()])
def test_behind_the_first_node_a_row_may_be_all_tail(options: SamplingOptions) -> None:
    """Ids that it must list are there with probability 0; the other rows are as they would be alone."""
    mask, listed = np.full((4, -(-SIZE // 8)), 0xFF, dtype=np.uint8), [np.array([7])] * 4
    (expected,) = result(RowRequest(nodes(LOGITS, options), 8, listed, 2))
    mask[2] = 0
    (found,) = result(RowRequest(replace(nodes(LOGITS, options), mask=mask), 8, listed, 2))
    for place, (row, other) in enumerate(zip(found(), expected(), strict=True)):
        if place == 2:
            assert (row.tail, *row.ids, *row.probabilities, *row.log_probabilities) == (1, 7, 0, -np.inf)
        else:
            np.testing.assert_array_equal(row.probabilities, other.probabilities)
            np.testing.assert_array_equal(row.log_probabilities, other.log_probabilities)
    with pytest.raises(NothingLeftError):
        result(RowRequest(replace(nodes(LOGITS, options), mask=mask), 8, required=3))


def ranked(
    options: SamplingOptions, draws: Draws, beside: int = 0, allowed: Columns | None = None, row_width: int = 0
) -> list[list[int]]:
    at = [draws.at(offset) for offset in OFFSETS]
    request = DrawRequest(LOGITS, options, CLOCKS, at, draws.key is not None, beside, allowed, row_width)
    (own,) = result(DistributionRequest(LOGITS, options, row_width, allowed))
    (found,) = result(request)
    for (_, own_row, _), cut in zip(found, own, strict=True):
        assert (own_row is not None) == (row_width > 0)
        for one, other in zip(own_row or (), cut, strict=False):
            np.testing.assert_array_equal(one, other)
    return [[one.token, *one.others] for one in found]


def by_hand(draws: Draws, ids: np.ndarray, row: np.ndarray, offset: int, count: int) -> list[int]:
    """A draw, and the next ones in the same race, or without a key the likeliest."""
    key, offset = draws.at(offset)
    drawn, ids, row = draws.noise.draw(ids, row, key, offset), ids[row > 0], row[row > 0]
    distances = -row if draws.key is None else draws.noise.exponentials(key, offset, ids) / row
    nearest = ids[np.argsort(distances, kind="stable")].tolist()
    return [drawn, *[token for token in nearest if token != drawn][:count]]


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("allowed", [None, np.array([2, 3, 5, 11, 13, 17])])
@pytest.mark.parametrize("options", [SamplingOptions(), SamplingOptions(0.7, top_k=6, min_p=0.01)])
def test_draws_from_whole_distributions_are_those_of_distributions_that_were_fetched(kind, allowed, options):
    columns = None if allowed is None else Columns.of(allowed, LOGITS.device)
    ids = np.arange(SIZE) if allowed is None else allowed
    here, there = draws()[kind], draws()[kind]
    for _ in range(10):
        found = ranked(options, here, 3, columns)
        distributions = distribution(LOGITS[:, ids], options).numpy()
        rows = enumerate(zip(distributions, OFFSETS, strict=True))
        due = [by_hand(there, ids, row, offset, 0 if place else 3) for place, (row, offset) in rows]
        assert found == due
        (cut,) = result(DistributionRequest(LOGITS, options, 5, columns))
        each = enumerate(zip(cut, OFFSETS, strict=True))
        due = [by_hand(there, *row, offset, 0 if place else 3) for place, (row, offset) in each]
        assert ranked(options, here, 3, columns, 5) == due


def test_where_few_can_be_drawn_the_best_others_stand_beside() -> None:
    order = LOGITS[0].argsort(descending=True).tolist()
    for number in range(2):
        (first, *others) = ranked(GREEDY, draws()[number], 3)
        assert first == order[:4]
        assert [len(row) for row in others] == [1, 1, 1]
        (first, *_) = ranked(SamplingOptions(top_k=2), draws()[number], 3)
        assert set(first[:2]) == set(order[:2])
        assert first[2:] == order[2:4]


def mixed(word: int) -> int:
    """splitmix64 as it is published, in unsigned numbers without bounds."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % 2**64
    return word ^ (word >> 31)


@given(st.lists(WORDS, min_size=1, max_size=20), MOMENTS)
def test_words_are_splitmix64_in_numpy_and_in_torch(words: list[int], at: tuple[NoiseKey, int]) -> None:
    first, second = moment(*at)
    due = [mixed(mixed((word + first) % 2**64) ^ (second % 2**64)) >> 11 for word in words]
    hashes = np.array(words, dtype=np.uint64).view(np.int64)
    assert uniform_words(hashes, first, second).tolist() == due
    assert uniform_words(torch.from_numpy(hashes), first, second).tolist() == due


@given(st.lists(MOMENTS, min_size=1, max_size=5))
def test_arrivals_are_those_of_the_noise(at: list[tuple[NoiseKey, int]]) -> None:
    distributions = torch.ones(len(at), MANY, dtype=torch.float64)
    found = Clocks(MANY_NOISE, CPU).arrivals(distributions, Moments.of(at, CPU))
    made = moments(*(each.numpy() for each in Moments.of(at, CPU)))
    assert np.stack(made, axis=1).tolist() == [list(moment(*each)) for each in at]
    for row, (key, offset) in zip(found, at, strict=True):
        np.testing.assert_allclose(row.numpy(), MANY_NOISE.exponentials(key, offset), rtol=4e-16)


@given(st.lists(st.tuples(MOMENTS, st.lists(st.just(0.0) | SMALL, min_size=9, max_size=9).filter(any)), min_size=1))
def test_a_device_draws_what_the_host_draws_bit_by_bit(rows: list[tuple[tuple[NoiseKey, int], list[float]]]) -> None:
    """Of all ids, of some columns, and of a few in another order; as on a CPU, and as on other devices."""
    at = Moments.of([moment for moment, _ in rows], CPU)
    weights = torch.tensor([weights for _, weights in rows], dtype=torch.float64)
    columns = torch.arange(3, 300, 33)
    places = torch.tensor([8, 1, 0, 2, 7, 4, 3, 6, 5]).expand(len(rows), -1)
    for on_host in (True, False):
        clocks = Clocks(MANY_NOISE, CPU)
        clocks._on_host = on_host
        for drawn, ids in (
            (clocks.draw(weights, at), range(9)),
            (clocks.draw(weights, at, columns), columns.tolist()),
            (clocks.draw(weights, at, columns, places), columns[places[0]].tolist()),
        ):
            for place, ((key, offset), row) in zip(drawn[:, 0].tolist(), rows, strict=True):
                assert ids[place] == MANY_NOISE.draw(np.array(ids), np.array(row), key, offset)


def test_of_two_that_arrive_at_once_the_lower_id_is_drawn() -> None:
    twins = Clocks(KeyedNoise([Letters("a")] * 4, [0] * 4), CPU)  # all have the same noise
    weights, at = torch.full((1, 4), 0.25, dtype=torch.float64), Moments.of([(KEY, 0)], CPU)
    assert int(twins.draw(weights, at)) == 0
    assert int(twins.draw(weights, at, None, torch.tensor([[3, 1, 2, 0]]))) == 3  # the place of column 0
    assert KeyedNoise([Letters("a")] * 4, [0] * 4).draw(np.array([3, 1, 2]), np.full(3, 0.3), KEY, 0) == 1


@pytest.mark.parametrize("width", [0, 8])
@pytest.mark.parametrize("allowed", [None, np.arange(1, MANY, 3)])
@pytest.mark.parametrize("options", DRAWS.values(), ids=DRAWS)
def test_a_captured_step_of_paths_draws_as_sessions_draw_alone(options, allowed, width, monkeypatch):
    """What a step does to tensors is noted, as a CUDA graph does it, and done again for other logits."""
    monkeypatch.setattr(distributions, "NUCLEUS", MANY)
    clocks = Clocks(MANY_NOISE, CPU, lengths=[1 + token % 3 for token in range(MANY)])
    clocks._on_host = False
    columns = None if allowed is None else Columns.of(allowed, CPU)
    logits = torch.randn(4, 5, MANY, generator=torch.Generator().manual_seed(2)) * 3
    forward = ForwardRequest(0, (1,), more=2)
    requests = [
        DrawRequest(row[None], options, clocks, ((NoiseKey(at), 4),), True, 0, columns, width, forward)
        for at, row in enumerate(logits[0])
    ]
    paths, here = Paths(requests), torch.empty(5, MANY)
    paths.begin()
    (replay, captured) = taped_extension(paths, here.copy_(logits[1]))
    for step in (2, 3):
        here.copy_(logits[step])
        replay()
        after = [draw_of(requests[row], logits[:, row], step) for row in range(5)]
        assert captured.tolist() == after


def taped_extension(paths: Paths, logits: torch.Tensor) -> tuple[Callable[[], None], torch.Tensor]:
    """One more step of the paths, noted while it is made; and where each replay leaves its ids."""
    ids = torch.empty(5, dtype=torch.int64)

    def run() -> None:
        paths.extend(logits)
        ids.copy_(paths.ids)

    tape = Tape()
    with tape:
        run()
    return tape.replay, ids


def draw_of(request: DrawRequest, rows: torch.Tensor, steps: int) -> int:
    """The last of some tokens that are drawn one after another, by requests of their own."""
    ((key, offset),) = request.at
    for row in rows[: steps + 1]:
        one = DistributionRequest(row[None], request.options, request.row_width, request.allowed)
        ((ids, weights),) = result(one)[0]
        token = MANY_NOISE.draw(ids, weights, key, offset)
        offset += request.clocks.letters[token]
    return token


def test_what_is_impossible_never_arrives_and_columns_have_the_noise_of_their_ids() -> None:
    distributions = torch.tensor([[0.0, 0.5, 0.5]], dtype=torch.float64)
    at = Moments.of([(NoiseKey(3), 4)], CPU)
    due = MANY_NOISE.exponentials(NoiseKey(3), 4, np.array([7, 9, 200])) / np.array([np.nan, 0.5, 0.5])
    pruned = Clocks(MANY_NOISE, CPU, np.array([7, 9, 200, 201])).arrivals(distributions, at)
    picked = Clocks(MANY_NOISE, CPU).arrivals(distributions, at, torch.tensor([7, 9, 200]))
    for found in (pruned, picked):
        assert found[0, 0] == torch.inf
        np.testing.assert_allclose(found[0, 1:].numpy(), due[1:], rtol=1e-15)


SIZES = (7, 256, 4099, 40_009)  # of vocabularies; of the last torch shares sums of a single row between threads
COUNTS = (1, 3, 0, 2)  # rows of each request
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3}
BANS = {"logit_bias": ((3, 2.0),), "bad_word_ids": ((4,), (1, 5)), "min_tokens": 4, "end_ids": (0,)}
OPTIONS = (
    SamplingOptions(temperature=0),
    SamplingOptions(),
    SamplingOptions(0.7, top_k=20, min_p=0.01),
    SamplingOptions(1.3, top_p=0.95),
    SamplingOptions(0.9, **PENALTIES, **BANS),
)
DRAW = torch.Generator().manual_seed(11)


def case(size: int, options: SamplingOptions, threads: int, flag: bool) -> object:
    """By default a small vocabulary, and what is most likely to differ in the largest one."""
    small, large = size == 256 and flag == (options in OPTIONS[::2]), size == SIZES[-1] and options is OPTIONS[3]
    usual = threads == 2 and (small or (large and not flag))
    return pytest.param(size, options, threads, flag, marks=[] if usual else full)


CASES = [case(*each) for each in product(SIZES, OPTIONS, (1, 2), (False, True))]


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def logits_of(size: int, flat: bool) -> list[torch.Tensor]:
    """Of one forward, as the engine gives them; flat ones, so that a nucleus has many ids."""
    whole = torch.randn(sum(COUNTS), size, generator=DRAW) * (0.1 if flat else 3)
    return list(whole.split(list(COUNTS)))


def nodes_of(logits: torch.Tensor, options: SamplingOptions) -> Nodes:
    path = tuple(torch.randint(0, logits.shape[-1], (3,), generator=DRAW).tolist())
    return nodes(logits, options, History(path[1:2], [path[2:]] * len(logits)), path[:1])


@cache
def clocks_of(size: int) -> Clocks:
    return Clocks(KeyedNoise([Letters(str(token)) for token in range(size)], [0] * size), torch.device("cpu"))


def plain(found: object) -> object:
    """With `==` by value."""
    if callable(found):
        found = found()
    if isinstance(found, Row):
        return found.ids.tolist(), found.probabilities.tolist(), found.tail
    if isinstance(found, np.ndarray):
        return found.tolist()
    return tuple(map(plain, found)) if isinstance(found, (tuple, list)) else found


def check(requests: list[sampler.SamplerRequest]) -> None:
    together = result(*requests)
    assert len(together) == len(requests)
    for request, found, count in zip(requests, together, COUNTS, strict=True):
        (alone,) = result(request)
        assert plain(found) == plain(alone)
        assert len(plain(found)) == count


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("size", "options", "threads", "flat"), CASES, indirect=["threads"])
def test_a_targets_answers_do_not_depend_on_others(size: int, options: SamplingOptions, flat: bool) -> None:
    clocks = clocks_of(size)
    every = [nodes_of(logits, options) for logits in logits_of(size, flat)]
    check([SampleRequest(one, clocks, NoiseKey(key), range(len(one.logits)), 5) for key, one in enumerate(every)])
    check([RowRequest(one, 8) for one in every])
    listed = [np.array([5, 0, 5])[:size] for size in (1, 2, 3)]
    check([RowRequest(one, 8, listed[: len(one.logits)]) for one in every])


def test_sessions_with_other_biases_and_bans_run_together_each_as_alone() -> None:
    """A batch of its own for each of them would cost all sessions time."""
    further: tuple[dict[str, Any], ...] = (
        {},
        {"logit_bias": ((3, 2.5), (3, 1.0), (0, -100.0))},
        {"allowed_token_ids": tuple(range(0, 300, 7))},
        {"bad_word_ids": ((9,), (1, 2)), "repetition_penalty": 1.3},
    )
    every = [SamplingOptions(0.7, top_k=9, **further[place % 4]) for place in range(len(COUNTS))]
    some = [nodes_of(logits, options) for logits, options in zip(logits_of(300, False), every, strict=True)]
    for requests in (
        [SampleRequest(one, clocks_of(300), NoiseKey(1), range(len(one.logits)), 5) for one in some],
        [RowRequest(one, 8) for one in some],
    ):
        assert len(batched(requests)) == 1
        check(requests)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("size", "options", "threads", "some"), CASES, indirect=["threads"])
def test_a_drafters_answers_do_not_depend_on_others(size: int, options: SamplingOptions, some: bool) -> None:
    clocks = clocks_of(size)
    allowed = Columns.of(np.arange(0, size, 2), torch.device("cpu")) if some else None
    every = logits_of(size, False)
    check([DistributionRequest(logits, options, 8, allowed) for logits in every])
    check([DistributionRequest(logits, options, 0, allowed) for logits in every])
    full = [(place, logits) for place, logits in enumerate(every) if len(logits)]
    for beside in (0, 4):
        at = [[(NoiseKey(place), row) for row in range(len(logits))] for place, logits in full]
        keyed = [
            DrawRequest(logits, options, clocks, each, True, beside, allowed)
            for (_, logits), each in zip(full, at, strict=True)
        ]
        random = [replace(one, keyed=False) for one in keyed]
        rows = [[replace(one, row_width=8) for one in draws] for draws in (keyed, random)]
        likeliest = [TopRequest(one.logits, options, clocks, one.at, True, 5, allowed) for one in keyed]
        for requests in (keyed, random, likeliest, *rows):
            for request, found in zip(requests, result(*requests), strict=True):
                assert plain(result(request)) == plain([found])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("keyed", [True, False])
@torch.inference_mode()
def test_the_likeliest_ids_and_their_costs(options: SamplingOptions, keyed: bool) -> None:
    """Shares of the arrival rates of a race where noise is shared, else of the distribution; the model's if greedy."""
    size, key = 50, NoiseKey(3)
    logits, clocks = torch.randn(4, size, generator=torch.Generator().manual_seed(1)), clocks_of(size)
    request = TopRequest(logits, options, clocks, [(key, at) for at in range(4)], keyed, 7)
    (rows,) = result(request)
    for at, row in enumerate(rows):
        warming = replace(options, temperature=options.temperature or 1.0)
        weights = tempered(logits[at : at + 1], Warping.of([warming], [1], CPU))[0]
        if not options.temperature:
            weights = logits[at].double().softmax(-1)
        elif keyed:
            weights = 1 / clocks.arrivals(weights[None], Moments.of([(key, at)], CPU))[0]
        weights /= weights.sum()
        order = [token for token in weights.argsort(descending=True).tolist() if weights[token] > 0]
        tokens, costs = zip(*row.likeliest, strict=True)
        assert [*tokens] == order[:7]
        assert [*costs] == pytest.approx([-math.log(weights[token]) for token in tokens])


def test_only_what_is_alike_is_answered_together(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow, clocks = torch.zeros(1, 6), torch.zeros(1, 5), clocks_of(6)

    def top(logits: torch.Tensor, count: int, allowed: Columns | None = None) -> TopRequest:
        return TopRequest(logits, OPTIONS[0], clocks, [(KEY, 0)] * len(logits), False, count, allowed)

    columns = [Columns.of(np.array(numbers), torch.device("cpu")) for numbers in ([1, 2], [1, 2], [2, 3])]
    tops = [top(wide, 2, allowed) for allowed in (None, columns[0], None, columns[1], columns[2])]
    laws = [DistributionRequest(wide, options, 4) for options in (OPTIONS[0], OPTIONS[1], GREEDY)]
    assert sorted(batched([*tops, top(narrow, 2), *laws])) == [[0, 2], [1, 3], [4], [5], [6, 8], [7]]
    monkeypatch.setattr(model_thread, "CACHED", 12)
    assert sorted(batched([top(torch.zeros(rows, 6), 2) for rows in (1, 1, 1, 1, 1, 9)])) == [[0, 1], [2, 3], [4], [5]]


def test_sessions_with_other_truncations_each_draw_as_alone() -> None:
    """What is left out for one session is not left out for another in the same step."""
    every = [SamplingOptions(0.7), SamplingOptions(0.7, top_p=0.3), SamplingOptions(1.5, top_k=9, min_p=0.2), GREEDY]
    for order in (every, every[::-1]):
        shared = [logits[:1].expand(2, -1) for logits in logits_of(300, False)[:1] * 4]
        some = [nodes_of(logits, options) for logits, options in zip(shared, order, strict=True)]
        for requests in (
            [SampleRequest(one, clocks_of(300), NoiseKey(1), range(2), 5) for one in some],
            [RowRequest(one, 8) for one in some],
            [DistributionRequest(logits, options, 8) for logits, options in zip(shared, order, strict=True)],
            [DistributionRequest(logits, options, 0) for logits, options in zip(shared, order, strict=True)],
        ):
            for batch in batched(requests):
                for index, found in zip(batch, result(*(requests[index] for index in batch)), strict=True):
                    (alone,) = result(requests[index])
                    assert plain(found) == plain(alone)
