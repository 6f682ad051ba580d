"""The tests' laws: how often they raise a false alarm, and that they find what they say they find.

Draws are from known distributions, with fixed seeds: nothing here can fail by chance.
"""

from dataclasses import replace

import numpy as np
import pytest
from scipy import special, stats

from crossdraft.audit import statistics as laws
from crossdraft.audit.statistics import Draw, chi_square, likeliest_error, missing, power_of, temperature

NAMES = tuple(f"t{number}" for number in range(12))
LISTED = 8
LEVEL = 0.001
LOGITS = np.random.default_rng(1).normal(0.0, 1.5, (40, len(NAMES)))  # of 40 places


def draws_of(
    count: int, seed: int, scale: float = 1.0, forbidden: int | None = None, logits: np.ndarray = LOGITS
) -> list[Draw]:
    """Draws at places that take turns; `scale` is of the temperature."""
    true = logits / scale
    if forbidden is not None:
        true[:, forbidden] = -np.inf
    places = np.arange(count) % len(logits)
    noise = np.random.default_rng(seed).gumbel(size=(count, len(NAMES)))
    chances_of, listed = special.softmax(logits, axis=1), np.argsort(-logits, axis=1)[:, :LISTED]
    names = [tuple(NAMES[one] for one in row) for row in listed]
    chances = [np.append(law[row], 1 - law[row].sum()) for law, row in zip(chances_of, listed, strict=True)]
    cells = [{int(token): cell for cell, token in enumerate(row)} for row in listed]
    return [
        Draw(NAMES[token], names[place], chances[place], cells[place].get(token, LISTED))
        for place, token in zip(places.tolist(), (true[places] + noise).argmax(axis=1).tolist(), strict=True)
    ]


@pytest.mark.parametrize("kind", ["chi-square", "temperature"])
def test_p_values_are_uniform_if_nothing_is_wrong(kind: str) -> None:
    values = []
    for seed in range(200):
        draws = draws_of(300, seed, logits=LOGITS[:1])
        found = chi_square("first token", "prompt 1", draws) if kind == "chi-square" else temperature(draws)
        values.append(found.p)
    assert stats.kstest(values, "uniform").pvalue > 0.01


@pytest.mark.parametrize(("chance", "count"), [(0.999, 4800), (0.99, 1200), (0.9, 600)])
def test_small_p_values_of_a_temperature_are_as_rare_as_they_say(chance: float, count: int) -> None:
    """By enumeration, of draws at places with two tokens of which one is nearly certain."""
    law = np.array([chance, 1 - chance, 0.0])
    places = [Draw(token, ("a", "b"), law, cell) for cell, token in enumerate("ab")]
    sizes, rare = {1e-3: 0.0, 1e-5: 0.0}, stats.binom(count, 1 - chance)
    for number in range(int(rare.ppf(1e-9)), int(rare.isf(1e-9)) + 1):
        found = temperature([places[0]] * (count - number) + [places[1]] * number)
        sizes = {level: size + rare.pmf(number) * (found.p < level) for level, size in sizes.items()}
    assert all(size < 1.3 * level for level, size in sizes.items())


@pytest.mark.parametrize("expected", [(5.0, 95.0), (5.0, 5.0, 5.0, 85.0)])
def test_small_p_values_of_a_chi_square_are_no_smaller_than_they_are(expected: tuple[float, ...]) -> None:
    """Against draws of its own; the usual approximation would be several times too small."""
    law, count = np.array(expected) / sum(expected), int(sum(expected))
    cells = np.array(expected)
    samples = np.random.default_rng(3).multinomial(count, law, 300_000)
    statistics = ((samples - cells) ** 2 / cells).sum(axis=1)
    limit = float(np.quantile(statistics, 0.999))
    p = laws.simulated(laws.Fit(count, limit, len(law) - 1, 0.0), law)
    assert 0.7 * np.mean(statistics >= limit) < p < 1.4 * np.mean(statistics >= limit)
    assert stats.chi2.sf(limit, len(law) - 1) < 0.7 * p


def test_a_token_is_rarely_called_missing_if_it_is_only_rare() -> None:
    """The bound holds for every number of draws and of tokens, so it is far from exact."""
    assert sum(missing(draws_of(60, seed)).p < 0.05 for seed in range(100)) <= 0.05 * 100


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_temperature_off_by_two_percent_is_found_at_the_sample_size_that_is_stated(sign: int) -> None:
    stated = power_of(draws_of(2_000, 0), 1, LEVEL).temperature
    count = int(2_000 * ((1 + 1 / 0.02) / (1 + 1 / stated)) ** 2)
    found = [temperature(draws_of(count, seed, 1 + sign * 0.02)) for seed in range(3)]
    assert sum(one is not None and one.p < LEVEL for one in found) >= 2
    assert all(one is not None and f" of {sign:+d}"[:5] in one.finding for one in found)
    unharmed = temperature(draws_of(count, 99))
    assert unharmed.p >= LEVEL


@pytest.mark.parametrize("scale", [0.8, 0.98, 1.0, 1.1, 1.25, 2.0])
def test_the_error_of_a_temperature_is_estimated_however_much_is_not_listed(scale: float) -> None:
    error, deviation = likeliest_error(draws_of(20_000, 3, scale))
    assert abs(error - (scale - 1)) < 3 * deviation
    assert deviation < 0.02 * scale


def test_lists_of_different_lengths_and_draws_that_follow_no_temperature() -> None:
    short = Draw("b", ("a", "b"), np.array([0.6, 0.4, 0.0]), 1)
    long = Draw("a", ("a", "b", "c"), np.array([0.5, 0.3, 0.1, 0.1]), 0)
    assert likeliest_error([short] * 50 + [long] * 60 + [replace(short, token="a", cell=0)] * 70) is not None
    assert likeliest_error([short] * 100) is None  # the less probable one always
    assert likeliest_error([replace(long, token="z", cell=3)]) is None  # nothing that is listed


def test_a_forbidden_token_is_found_at_the_stated_expectation() -> None:
    draws = draws_of(2_000, 3, forbidden=5)
    found, power = missing(draws), power_of(draws, 1, LEVEL)
    assert "'t5'" in found.finding
    assert found.p < LEVEL
    expected = np.cumsum([dict(zip(one.listed, one.probabilities, strict=False)).get("t5", 0.0) for one in draws])
    enough = int(np.searchsorted(expected, power.missing)) + 1
    assert missing(draws[:enough]).p < LEVEL
    assert missing(draws_of(2_000, 3)).p > 0.5


def test_cells_are_pooled_and_too_few_draws_are_no_test() -> None:
    assert chi_square("first token", "prompt 1", draws_of(3, 0, logits=LOGITS[:1])) is None
    assert chi_square("first token", "prompt 1", []) is None
    found = chi_square("first token", "prompt 1", draws_of(40, 0, logits=LOGITS[:1]))
    assert (found.count, 1 <= found.freedom < LISTED) == (40, True)


def test_what_is_too_little_for_a_cell_joins_the_smallest() -> None:
    distribution = np.array([0.9, 0.09, *[0.0001] * 100])  # the rest: an expectation of 1
    found = laws.fit_of({0: 80, 1: 15, 7: 5}, distribution)
    assert (found.statistic, found.freedom) == pytest.approx((10**2 / 90 + 10**2 / 10, 1))


def test_a_certain_place_tells_nothing_of_the_temperature() -> None:
    certain = Draw("a", ("a",), np.array([1.0, 0.0]), 0)
    found = temperature([certain] * 50), power_of([certain] * 50, 1, LEVEL).temperature, missing([certain] * 50).p
    assert found == (None, None, 1.0)


def test_holm() -> None:
    assert laws.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert (laws.holm([0.9, 0.8]), laws.holm([])) == ([1.0, 1.0], [])
