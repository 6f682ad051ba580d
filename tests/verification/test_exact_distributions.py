"""The output distribution of whole sessions, by enumeration of every random choice, against the target's own."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from crossdraft.text.grammar import Grammar, GrammarCompiler, GrammarMatcher
from crossdraft.text.letters import Letters, Side
from crossdraft.types.messages import SamplingOptions
from crossdraft.types.rows import DraftToken, Row
from crossdraft.types.statistics import Kind
from crossdraft.verification import coupling, rejection
from crossdraft.verification import walk as walks
from crossdraft.verification.chooser import Chooser, RandomChooser
from crossdraft.verification.methods import COUPLED, COUPLED_SHARED, SLEM, SLRS, STANDARD, TLI, TOKENTIMING, Method
from tests.conftest import FULL
from tests.tables import ToyDrafter, ToyTarget, pair_of
from tests.verification import toys
from tests.verification.enumerating import distance, distribution_of, few_or_full, full
from tests.verification.toys import METHODS, ROWS

PAIR = pair_of(("a", "b"), ("a", "b"))
HEAD = Row(toys.as_ids(0), np.zeros(1), 1.0)  # at 0 so that the tail is drawn
WHOLE = Row(toys.as_ids(0), np.ones(1))


def suitable(method: Method) -> list[toys.Toy]:
    if method.same_vocabulary:
        return [*(toy.with_itself() for toy in toys.TOYS), *toys.ALIKE]
    return [*toys.TOYS, *toys.ALIKE, *(toys.TEXTS if method.walk is coupling.walk else ())]


def shapes(method: Method, toy: toys.Toy) -> list[tuple[int, int]]:
    """K = 1 to 3 and tokens; with two letters on a side also rounds whose third draft token is judged, and one more."""
    longer = len(toy.target) == len(toy.drafter) == 2 and method in (STANDARD, TLI, SLEM, COUPLED)
    return [(1, 3), (2, 2), (2, 3), (3, 2)] + ([(3, 4)] if longer else [])


def cells() -> list[toys.Setup]:
    """Every method, pair and K; below temperature 1 the distributions are others, and the output shorter."""
    pairs = [(method, toy) for method in METHODS for toy in suitable(method)]
    plain = [toys.Setup(toy, method, *shape) for method, toy in pairs for shape in shapes(method, toy)]
    cooler = [toys.Setup(toy, method, k, 2, temperature=0.6) for method, toy in pairs for k in (1, 2, 3)]
    return few_or_full(plain + cooler, usual)


def usual(setup: toys.Setup) -> bool:
    """Every method and pair with one K, each K with every method and every pair, and one pair below temperature 1."""
    names = [toy.name for toy in (*toys.TOYS, *toys.TEXTS, *toys.ALIKE)]
    place = METHODS.index(setup.method) + names.index(setup.toy.name)
    if setup.temperature < 1:
        return setup.toy.name == toys.NESTED.name and setup.draft_tokens == 2
    return (setup.draft_tokens, setup.length) == ((1, 3), (2, 2), (3, 2))[place % 3]


def named(setup: toys.Setup) -> str:
    return f"{setup.method.name}-{setup.toy.name}-K{setup.draft_tokens}-{setup.length}-T{setup.temperature:g}"


@pytest.mark.parametrize("setup", cells(), ids=named)
def test_output_distribution_is_the_targets(setup: toys.Setup) -> None:
    assert toys.error(setup) < toys.EXACT


@pytest.mark.parametrize("head", few_or_full([1, 2], lambda head: head == 1))
@pytest.mark.parametrize("draft_tokens", few_or_full([1, 2, 3], lambda k: k == 2))
@pytest.mark.parametrize("method", ROWS, ids=lambda method: method.name)
def test_truncated_rows_have_the_same_distribution(method: Method, draft_tokens: int, head: int) -> None:
    """Over every third pair, unless all tests run."""
    for toy in suitable(method) if FULL else suitable(method)[1::3]:
        assert toys.error(toys.Setup(toy, method, draft_tokens, 2, head=head)) < toys.EXACT, toy.name


@pytest.mark.parametrize("head", [1, full(99)])
@pytest.mark.parametrize(
    "method",
    few_or_full(METHODS, lambda method: method in (TLI, COUPLED_SHARED, SLEM)),  # one of each walk
    ids=lambda method: method.name,
)
def test_penalties_and_bans_change_the_distribution_and_nothing_else(method: Method, head: int) -> None:
    """What may be drawn depends on the tokens before: on draft tokens, for later rows of a pass."""
    options = SamplingOptions(frequency_penalty=1.5, bad_word_ids=((1, 1), (0, 1, 0)), min_tokens=2, end_ids=(1,))
    toy = toys.NESTED.with_itself() if method.same_vocabulary else toys.NESTED
    setup = toys.Setup(toy, method, 2, 3, head=head, options=options)
    assert toys.error(setup) < toys.EXACT
    assert not any(1 in output[:2] for output in toys.wanted(setup))
    assert distance(toys.wanted(setup), toys.wanted(replace(setup, options=None))) > 0.05


@pytest.mark.parametrize("head", [1, 99])
@pytest.mark.parametrize("toy", [toys.ENDING, toys.NESTED], ids=lambda toy: toy.name)
@pytest.mark.parametrize("method", [*METHODS, SLRS], ids=lambda method: method.name)
def test_a_grammar_masks_both_models_and_the_distribution_is_the_targets_masked(method, toy, head, monkeypatch):
    """Each row of a pass by the path that leads to it, and the drafter's rows by the same letters."""
    setup = toys.Setup(toy.with_itself() if method.same_vocabulary else toy, method, 2, 3, head=head)
    grammar, free, drafted = Grammar.regex("(ab|ba|b)+"), ToyTarget.distribution, ToyDrafter.distribution

    def matcher_of(letters: Sequence[str]) -> GrammarMatcher:
        ends = [token for token, one in enumerate(letters) if one == toys.END]
        return GrammarCompiler([*map(Letters, letters)], ends).matcher(grammar)

    def kept(matcher: GrammarMatcher, text: str, weights: np.ndarray) -> np.ndarray:
        (mask,) = matcher.masks(Letters(text), [Letters("")], must=False)
        found = weights * np.unpackbits(mask, count=len(weights), bitorder="little")
        return found / found.sum() if found.any() else weights

    ours, theirs = matcher_of(setup.toy.target), matcher_of(setup.toy.drafter)

    laws: dict[tuple[int, ...], np.ndarray] = {}  # all toys of a side are alike
    rows: dict[Letters, Row] = {}

    def of_target(toy: ToyTarget, path: tuple[int, ...]) -> np.ndarray:
        if path not in laws:
            laws[path] = kept(ours, "".join(setup.toy.target[token] for token in path), free(toy, path))
        return laws[path]

    def of_drafter(toy: ToyDrafter, text: Letters) -> Row:
        if text not in rows:
            row, weights = drafted(toy, text), np.zeros(len(toy.letters))
            weights[row.ids] = row.probabilities
            rows[text] = Row(row.ids, kept(theirs, text, weights)[row.ids])
        return rows[text]

    plain = toys.wanted(setup)
    monkeypatch.setattr(ToyTarget, "distribution", of_target)
    monkeypatch.setattr(ToyDrafter, "distribution", of_drafter)
    law = toys.wanted(setup)
    assert toys.error(setup) < toys.EXACT
    assert distance(law, plain) > 0.05
    texts = ["".join(setup.toy.target[token] for token in path) for path, weight in law.items() if weight]
    assert all(re.fullmatch("(ab|ba|b)*a?", text.rstrip(toys.END)) for text in texts)
    assert all(re.fullmatch("(ab|ba|b)+", text.rstrip(toys.END)) for text in texts if text.endswith(toys.END))


@pytest.mark.parametrize("method", [*METHODS, SLRS], ids=lambda method: method.name)
@pytest.mark.parametrize(("draft_tokens", "length"), [(2, 2), full(1, 3), full(2, 3), full(3, 2)])
def test_ignoring_the_end_symbol(method: Method, draft_tokens: int, length: int) -> None:
    toy = toys.ENDING.with_itself() if method.same_vocabulary else toys.ENDING
    assert toys.error(toys.Setup(toy, method, draft_tokens, length, ignore_end=True)) < toys.EXACT


@pytest.mark.parametrize("method", [*METHODS, SLRS], ids=lambda method: method.name)
def test_what_a_drafter_leaves_out_of_its_context_changes_no_distribution(method, monkeypatch):
    """A symbol of the target's, which it cannot write: its rows are those after another text."""
    unknown = Side.TARGET.control(0)
    toy, known = toys.Toy("unknown to the drafter", ("a", "b", unknown), ("a", "ab", "b")), ToyDrafter.distribution
    heard = lambda drafter, text: known(drafter, Letters(text.replace(unknown, "")))  # noqa: E731
    monkeypatch.setattr(ToyDrafter, "distribution", heard)
    assert toys.error(toys.Setup(toy.with_itself() if method.same_vocabulary else toy, method, 2, 3)) < toys.EXACT


@pytest.mark.parametrize("method", [*METHODS, SLRS, TOKENTIMING], ids=lambda method: method.name)
@pytest.mark.parametrize("draft_tokens", [1, 3])
def test_temperature_zero_is_the_greedy_text(method: Method, draft_tokens: int) -> None:
    for toy in suitable(method):
        setup = toys.Setup(toy, method, draft_tokens, 4, temperature=0)
        distribution = distribution_of(setup.run)
        assert distribution.keys() == toys.wanted(setup).keys(), toy.name
        assert len(distribution) == 1


# A drafter that reads the target's hidden states: what it drafts depends on the passes that were made, too.


@pytest.mark.parametrize("nodes", [0, full(12)])
@pytest.mark.parametrize("method", [STANDARD, TLI, COUPLED], ids=lambda method: method.name)
def test_drafters_that_read_hidden_states(method: Method, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = toys.Setup(toys.SAME if method is STANDARD else toys.NESTED, method, 1, 4, nodes=nodes, states=True)
    assert toys.error(setup) < toys.EXACT
    told, propose = [], ToyDrafter.propose

    def without_states(drafter: ToyDrafter) -> DraftToken:
        """With the row that it would have drawn from if it had not been told any."""
        drawn, states, drafter.told = propose(drafter), drafter.told, {}
        before = Letters(drafter.text[: -len(drafter.spelled(drawn))])
        row, drafter.told = drafter.distribution(before), states
        told.append(states)
        return replace(drawn, row=row)

    monkeypatch.setattr(ToyDrafter, "propose", without_states)
    assert toys.bias(setup) > 0.001
    assert any(told)


# Several tokens at a node: beside the draft tokens of a chain the pass has others that the drafter's row gives, and
# what replaces a refused one is followed by another draw where it was among them.


def trees() -> list[toys.Setup]:
    pairs = [(method, toy) for method in ROWS for toy in suitable(method)]
    shapes = ((2, 99), (1, 1))
    found = [toys.Setup(toy, method, k, 3, head=head, nodes=12) for method, toy in pairs for k, head in shapes]
    return few_or_full(found, lambda setup: setup.toy.name in (toys.NESTED.name, toys.ENDING.name))


@pytest.mark.parametrize("setup", trees(), ids=named)
def test_trees_of_methods_that_judge_rows(setup: toys.Setup) -> None:
    assert toys.error(setup) < toys.EXACT


@pytest.mark.parametrize("method", [STANDARD, TLI, COUPLED], ids=lambda method: method.name)
def test_a_tree_saves_passes(method: Method) -> None:
    chain = toys.Setup(toys.TWO.with_itself(), method, 1, 5, ignore_end=True)
    assert toys.mean(replace(chain, nodes=12), "passes") < 0.85 * toys.mean(chain, "passes")


@pytest.mark.parametrize("method", [TLI, COUPLED], ids=lambda method: method.name)
def test_trees_whose_further_draws_are_wrong(monkeypatch: pytest.MonkeyPatch, method: Method) -> None:
    """The enumeration notices draws from another distribution, and draws that are dropped."""

    def likeliest(_: Chooser, known: bool) -> walks.Walk:
        while (row := (yield walks.NeedRow(known=True))) is not None:
            yield walks.Emit(int(row.ids[row.probabilities.argmax()]), Kind.BONUS)

    def choosy(chooser: Chooser, known: bool) -> walks.Walk:
        """Drops its draw of the first token, and leaves the place to the next round."""
        row = yield walks.NeedRow(known=True)
        if isinstance(row, Row) and (token := (yield from walks.draw_residual(chooser, row, None))):
            yield walks.Emit(token, Kind.BONUS)

    for broken in (likeliest, choosy):
        monkeypatch.setattr(walks, "undrafted", broken)
        assert toys.bias(toys.Setup(toys.SAME, method, 2, 3, nodes=12, ignore_end=True)) > 0.005, broken


@pytest.mark.parametrize("walk", [rejection.walk, coupling.walk])
@pytest.mark.parametrize("draft_token", [DraftToken(0, Row.certain(0)), None], ids=["refused", "none"])
def test_the_whole_row_is_drawn_from(walk: Callable[[walks.Ground], walks.Walk], draft_token: DraftToken | None):
    walking = walk(walks.Ground(PAIR, RandomChooser(np.random.default_rng(0))))
    step: walks.WalkStep = next(walking)
    while not isinstance(step, walks.Emit | walks.Refused):
        match step:
            case walks.NeedDraftToken():
                step = walking.send(draft_token)
            case walks.NeedRow():
                step = walking.send(WHOLE if step.whole else HEAD)
    assert step == walks.Emit(0, Kind.BONUS if draft_token is None else Kind.CORRECTED)


@pytest.mark.parametrize(
    ("weights", "number", "drawn"),
    [
        ([0, 1, 0, 3, 0], 0.0, 1),
        ([0, 1, 0, 3, 0], 0.2499, 1),
        ([0, 1, 0, 3, 0], 0.25, 3),
        ([0.1] * 10 + [0.0], np.nextafter(1, 0), 9),  # their sums end below 1
    ],
)
def test_the_chooser_of_production_draws_in_proportion(weights: list[float], number: float, drawn: int) -> None:
    """Whatever they sum to, and nothing that has none."""
    chooser = RandomChooser(SimpleNamespace(random=lambda size=(): np.full(size, number)))  # type: ignore[arg-type]
    assert (chooser.categorical(weights), chooser.candidates(weights, 2)) == (drawn, (drawn, drawn))
    for wrong in ([0.0, 0.0], [-1.0, 2.0], [np.inf, 1.0], [np.nan]):
        with pytest.raises(ValueError, match="weights must be finite, none negative, not all zero"):
            chooser.categorical(wrong)
