"""The output distribution of overlapped sessions, by enumeration, under schedules that delay and batch messages at
will.

A schedule sees only how many steps were made, and the distribution is the target's own. That the comparison fails when
a schedule peeks, or when a session is broken on purpose, is tested beside (test_peeking).
"""

import itertools
from dataclasses import replace

import pytest

from crossdraft.speculation.choice import PLAIN, Choice
from crossdraft.verification.methods import (
    COUPLED,
    COUPLED_SHARED,
    RDK,
    SEEDED,
    SLEM,
    SLRS,
    STANDARD,
    TLI,
    UNION,
    Method,
)
from tests.conftest import FULL
from tests.verification.enumerating import EnumeratingChooser, distribution_of, few_or_full, full
from tests.verification.scheduling import Overlapped, Schedule
from tests.verification.test_seeded_distribution import LENGTH, Runs
from tests.verification.toys import ALIKE, ENDING, EXACT, NESTED, TEXTS, TOYS, TWO, Toy, error

METHODS = (STANDARD, UNION, TLI, RDK, SLEM, COUPLED, COUPLED_SHARED)
LETTERS = Toy("two letters", ("a", "b"), ("a", "b"))
LETTER_BY_LETTER = Toy("one letter each, two of the target's", ("a", "b", "ab"), ("a", "b"))
CHOICES = (
    Choice(2, 1),
    Choice(4, 1, chunk=2),
    Choice(1, patience=0),
    Choice(3, 2),
    Choice(4, 0, patience=0),
    Choice(4, 1),
)
TREE = Choice(2, 2, overlap=False, tree_nodes=6)
ENDED = replace(TREE, least_likely=0.5)  # ... that the drafter ends by what it has drawn
FEW = ("DT", "TTD", "DDT", "TDS")  # the drafter as fast as the target, late, ahead; waits that end
PATTERNS = [*FEW, *sorted({"".join(acts) for acts in itertools.product("DTS", repeat=3)} - {*FEW})]


def toys_of(method: Method, window: int) -> tuple[Toy, ...]:
    """Two letters a side where many draft tokens are under way at once; else three."""
    toys = (TWO,) if window > 2 else (NESTED, LETTER_BY_LETTER) if method is COUPLED else (NESTED,)
    toys = (NESTED, TWO, LETTER_BY_LETTER) if FULL and window <= 2 else toys
    if not method.same_vocabulary:
        return toys
    return (*(toy.with_itself() for toy in toys), *(ALIKE[1:3] if window <= 2 else ()))


def check(method: Method, choices: tuple[Choice, ...], schedule: Schedule, **changes: int) -> None:
    """Every toy of the method, and rows of one id besides what is asked for; with all tests also of two."""
    for toy in toys_of(method, max(choice.max_draft_tokens for choice in choices)):
        length = 3 if len(toy.target) == 2 else 2
        for head in range(1, len(toy.target) if FULL and not method.samples else 2):
            given = replace(Overlapped(toy, method, choices, schedule, length, head), **changes)
            assert error(given) < EXACT, given


named = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
# One of each walk: what happens to a session's services it is told in the same way.
walks = pytest.mark.parametrize(
    "method", few_or_full(METHODS, lambda method: method in (TLI, COUPLED, SLEM)), ids=lambda method: method.name
)


@pytest.mark.parametrize(
    ("number", "pattern"),
    [
        (number, pattern) if pattern in FEW[number % 2 :: 2] else full(number, pattern)
        for number in range(len(METHODS))
        for pattern in PATTERNS
    ],
)
def test_draft_tokens_that_come_when_they_like(number: int, pattern: str) -> None:
    """Each method under two patterns with one choice each; the full tests have all."""
    for choice in CHOICES if FULL else CHOICES[(number // 2 + FEW.index(pattern)) % 2 :][:1]:
        check(METHODS[number], (choice,), Schedule(pattern))


@named
@pytest.mark.parametrize("pattern", few_or_full(FEW, lambda pattern: pattern == "TDS"))
def test_choices_that_change_from_epoch_to_epoch(method: Method, pattern: str) -> None:
    choices = (Choice(1, 1), PLAIN, Choice(2, 2, overlap=False), Choice(3, 0, patience=0))
    check(method, choices, Schedule(pattern))


PAIRED = (COUPLED, UNION, SLEM, TLI)  # one of each walk over every pair
PAIRS = [(toy, method) for toy in TOYS for method in PAIRED if method is not TLI or toy.name != "nothing shared"]


@pytest.mark.parametrize(
    ("toy", "method"),
    few_or_full(PAIRS, lambda pair: (TOYS.index(pair[0]) + PAIRED.index(pair[1])) % 4 == 0)
    + [(toy, COUPLED) for toy in TEXTS],
    ids=lambda given: given.name,
)
def test_every_pair_of_vocabularies(toy: Toy, method: Method) -> None:
    for pattern in ("TDS", "TTD") if FULL else ("TDS",):
        for choice in (Choice(2, 1), TREE) if method is SLEM else (Choice(2, 1),):
            assert error(Overlapped(toy, method, (choice,), Schedule(pattern), 2, 1)) < EXACT


@walks
@pytest.mark.parametrize("pattern", few_or_full(FEW, lambda pattern: pattern == "TDS"))
@pytest.mark.parametrize("following", [Choice(3, 0, patience=0, review_after=1), PLAIN], ids=["goes on", "ends"])
def test_long_epochs_that_are_reviewed(method: Method, pattern: str, following: Choice) -> None:
    check(method, (Choice(4, 1, chunk=2, review_after=1), following), Schedule(pattern))


@walks
@pytest.mark.parametrize("opens", few_or_full(range(1, 9), lambda opens: opens in (2, 3)))
def test_a_drafter_that_opens_late(method: Method, opens: int) -> None:
    for pattern in ("T", "TD") if FULL else ("TD",):
        check(method, (Choice(2, 1),), Schedule(pattern, opens=opens))


@walks
@pytest.mark.parametrize("pattern", few_or_full([*FEW], lambda pattern: pattern in ("DDT", "TDS")))
def test_a_drafter_that_is_not_wanted_at_first(method: Method, pattern: str) -> None:
    """It opens in the middle of the target's run, and drafts for what follows."""
    assert error(Overlapped(TWO, method, (Choice(2, 1),), Schedule(pattern), 4, 1, unwanted=1)) < EXACT


@walks
@pytest.mark.parametrize("lost", few_or_full(range(1, 12), lambda lost: lost in (2, 3, 4)))
def test_a_drafter_that_is_lost_and_comes_back(method: Method, lost: int) -> None:
    for pattern, opens in (("DT", 0), ("TD", lost + 2)):
        check(method, (Choice(2, 1),), Schedule(pattern, opens, ((lost, "d"),)))


@walks
@pytest.mark.parametrize("lost", few_or_full(range(1, 12), lambda lost: lost in (2, 3)))
def test_a_target_that_is_lost_and_another_that_goes_on(method: Method, lost: int) -> None:
    for pattern in ("DT", "TDD") if FULL else ("TDD",):
        check(method, (Choice(2, 1),), Schedule(pattern, 0, ((lost, "t"), (lost + 2, "t"))))


@walks
@pytest.mark.parametrize("pattern", ["DDOT", full("ODTDT"), full("DTO"), full("DDDTO")])
def test_two_targets_with_speculation(method: Method, pattern: str) -> None:
    for losses in ((), ((4, "t"),)) if FULL else (((4, "t"),),):
        check(method, (Choice(3, 1, speculate=True),), Schedule(pattern, 0, losses), targets=2)
    check(method, (Choice(2, 1, speculate=True), PLAIN), Schedule(pattern), targets=2)


@pytest.mark.parametrize(
    ("method", "budget"),
    few_or_full(itertools.product(METHODS, (0, 1)), lambda given: given in ((TLI, 0), (COUPLED, 1))),
)
def test_row_misses(method: Method, budget: int) -> None:
    for pattern in ("DT", "DDT", "TTDS") if FULL else ("DDT",):
        check(method, (Choice(3, 1),), Schedule(pattern), tree_budget=budget)


@named
@pytest.mark.parametrize("pattern", ["DDT", full("DT"), full("TDS")])
@pytest.mark.parametrize(("window", "depth", "width"), [(1, 1, 1), full(2, 1, 1), full(1, 2, 1)])
def test_prepared_continuations(method: Method, pattern: str, window: int, depth: int, width: int) -> None:
    check_branches(method, pattern, Choice(window, 1, branch_depth=depth, branch_width=width), window + depth)


@pytest.mark.parametrize(("window", "depth"), [(2, 1), full(1, 2)])
def test_longer_prepared_continuations(window: int, depth: int) -> None:
    """Of one method; the others' are among the full tests above."""
    check_branches(COUPLED, "DDT", Choice(window, 1, branch_depth=depth, branch_width=1), window + depth)


def check_branches(method: Method, pattern: str, choice: Choice, letters: int) -> None:
    nested = NESTED.with_itself() if method.same_vocabulary else NESTED
    for toy in (LETTERS, nested) if FULL and letters == 2 else (LETTERS,):
        given = Overlapped(toy, method, (choice,), Schedule(pattern), 4 if method.samples else 3, 1)
        for paths in (2, 4) if FULL and letters == 2 else (4,):
            assert error(replace(given, paths=paths)) < EXACT, given


@pytest.mark.parametrize("pattern", few_or_full(FEW, lambda pattern: pattern in ("DT", "TDS")))
@pytest.mark.parametrize("choices", [(TREE,), (ENDED,), full((TREE, Choice(3, 1), PLAIN)), full((Choice(2, 1), ENDED))])
def test_draft_trees(choices: tuple[Choice, ...], pattern: str) -> None:
    ways = ((16, ()), (2, ((4, "t"), (6, "d"))))
    for toy, (budget, losses) in (
        itertools.product((LETTERS, NESTED, ENDING), ways) if FULL else zip((NESTED, LETTERS), ways, strict=True)
    ):
        given = Overlapped(toy, SLEM, choices, Schedule(pattern, 0, losses), 3, 1, tree_budget=budget)
        assert error(given) < EXACT, given


def test_a_pass_over_a_tree_goes_on_beyond_a_refusal() -> None:
    """Else the test above would say nothing: with a chain a refusal is the last token of its pass."""
    given = Overlapped(LETTERS, SLEM, (TREE,), Schedule("DT"), 4, 1)

    def passes(chosen: Choice) -> float:
        def counted(chooser: EnumeratingChooser) -> int:
            stage = replace(given, choices=(chosen,)).stage(chooser)
            given.schedule.play(stage)
            return stage.session.counts.passes

        return sum(number * chance for number, chance in distribution_of(counted).items())

    assert passes(TREE) < passes(replace(TREE, tree_nodes=0)) - 0.5


@pytest.mark.parametrize("method", [full(TLI), COUPLED, full(SLEM)], ids=lambda method: method.name)
def test_prepared_continuations_are_adopted(method: Method) -> None:
    """Else the test above would say nothing. A target that draws by itself does so until the drafter has come."""
    length = 4 if method.samples else 3
    given = Overlapped(LETTERS, method, (Choice(1, 1, branch_depth=1),), Schedule("DT"), length, 1)

    def hits(chooser: EnumeratingChooser) -> int:
        stage = given.stage(chooser)
        given.schedule.play(stage)
        return stage.session.counts.branches_hit

    assert sum(chance for adopted, chance in distribution_of(hits).items() if adopted) > 0.05


@named
def test_an_end_symbol(method: Method) -> None:
    toy = ENDING.with_itself() if method.same_vocabulary else ENDING
    for choice, pattern in itertools.product(CHOICES[:4] if FULL else CHOICES[:1], ("DT", "TDS") if FULL else ("DT",)):
        assert error(Overlapped(toy, method, (choice,), Schedule(pattern), 2, 1)) < EXACT


@pytest.mark.parametrize("pattern", ["DT", "TDS"])
def test_slrs_in_rounds_with_losses(pattern: str) -> None:
    """Its rounds are whole, whatever happens between them."""
    for opens, losses in ((0, ()), (3, ()), (0, ((4, "t"),)), (0, ((5, "t"), (7, "t")))):
        given = Overlapped(NESTED, SLRS, (Choice(2, 2, overlap=False),), Schedule(pattern, opens, losses), 2, 1)
        assert error(given) < EXACT, given


@pytest.mark.parametrize("toy", few_or_full(TOYS, lambda toy: toy in (NESTED, ENDING)), ids=lambda toy: toy.name)
def test_seeded_text_is_the_same_whatever_happens(toy: Toy) -> None:
    runs = Runs(toy)
    schedules = [Schedule("DT"), Schedule("TDS"), Schedule("TDD", 3, ((5, "t"), (8, "d"), (11, "t"))), Schedule("SD")]
    choices = (Choice(3, 1), Choice(2, 0, patience=0), Choice(2, 1, branch_depth=2, branch_width=2), PLAIN, TREE)
    for seed, schedule in itertools.product(range(5 if FULL else 2), schedules):
        wanted = runs.output(seed, 0)
        for choice, targets in itertools.product(choices, (1, 2)):
            chosen = replace(choice, speculate=targets == 2)
            given = Overlapped(toy, SEEDED, (chosen,), schedule, LENGTH, 99, targets)
            assert tuple(one.token for one in runs.play(given, seed).emitted) == wanted
