"""Overlapped drafting: distributions in any order of events, also of seeded output, and what nothing may look at."""

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest

from crossdraft.audit.statistics import fit_of
from crossdraft.session.drafter_side import Branches
from crossdraft.session.epoch import Epoch
from crossdraft.session.events import Command, Replied, Reply, Timer
from crossdraft.session.rules import State
from crossdraft.session.session import Session
from crossdraft.session.target_side import Answers
from crossdraft.speculation.choice import PLAIN, Choice, lock_step
from crossdraft.text.letters import Letters
from crossdraft.text.vocabulary import Vocabulary
from crossdraft.types.messages import Branch, Drafted, NoiseKey, Sample
from crossdraft.types.rows import DraftToken
from crossdraft.types.statistics import Kind
from crossdraft.verification.chooser import Chooser, RandomChooser
from crossdraft.verification.methods import COUPLED, SEEDED, SLEM, SLRS, STANDARD, TLI, UNION, Method
from crossdraft.verification.noise import KeyedNoise
from crossdraft.verification.walk import NeedRow
from tests.clock import Stage, run_session
from tests.conftest import FULL
from tests.ports import assignment
from tests.tables import LimitedTarget, ToyDrafter, ToyTarget, autoregressive_distribution, pair_of
from tests.verification import toys
from tests.verification.enumerating import few_or_full, full
from tests.verification.toys import ENDING, EXACT, METHODS, NESTED, TOYS, TWO, Overlapped, Schedule, Toy, bias, error

LETTERS = Toy("two letters", ("a", "b"), ("a", "b"))
LETTER_BY_LETTER = Toy("one letter each, two of the target's", ("a", "b", "ab"), ("a", "b"))
CHOICES = [Choice(2, 1), Choice(4, 1, chunk=2), Choice(1, patience=0)]
CHOICES += [Choice(3, 2), Choice(4, 0, patience=0), Choice(4, 1)]
named = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
PAIRED = (COUPLED, UNION, SLEM, TLI)  # one of each walk over every pair
PAIRS = [(toy, method) for toy in TOYS for method in PAIRED if method is not TLI or toy.name != "nothing shared"]
BIASED = 0.01  # total variation
ADOPTED = Overlapped(LETTERS, TLI, (Choice(1, 1, branch_depth=1),), Schedule("DT"), 3, salt="t7")
COVERS = Answers.covers
NARROW, MATCH = Overlapped(NESTED, COUPLED, (Choice(2, 2),), Schedule("DDT"), 3, paths=1), Branches.match
TREE = Choice(2, 2, overlap=False, tree_nodes=6)
ENDED = replace(TREE, least_likely=0.5)  # ... that the drafter ends by what it has drawn
FEW = ("DT", "TTD", "DDT", "TDS")  # the drafter as fast as the target, late, ahead; waits that end
PATTERNS = [*FEW, *sorted({"".join(acts) for acts in itertools.product("DTS", repeat=3)} - {*FEW})]
LENGTH = 3
SEEDS = 2000 if FULL else 500
SMALLEST_P = 1e-4
NO_CHOICE = RandomChooser.__new__(RandomChooser)  # `seeded` makes no choice of its own


def toys_of(method: Method, window: int) -> tuple[Toy, ...]:
    """Two letters a side where many draft tokens are under way at once; else three."""
    few = (TWO,) if window > 2 else (NESTED, LETTER_BY_LETTER) if method is COUPLED else (NESTED,)
    some = (NESTED, TWO, LETTER_BY_LETTER) if FULL and window <= 2 else few
    if not method.same_vocabulary:
        return some
    return (*(toy.with_itself() for toy in some), *(toys.ALIKE[1:3] if window <= 2 else ()))


def check(method: Method, choices: tuple[Choice, ...], schedule: Schedule, **changes: int) -> None:
    """Every toy of the method, and rows of one id besides what is asked for; with all tests also of two."""
    for toy in toys_of(method, max(choice.max_draft_tokens for choice in choices)):
        length = 3 if len(toy.target) == 2 else 2
        for head in range(1, len(toy.target) if FULL and not method.samples else 2):
            given = replace(Overlapped(toy, method, choices, schedule, length, head), **changes)
            assert error(given) < EXACT, given


# One of each walk: what happens to a session's services it is told in the same way.
walks = pytest.mark.parametrize(
    "method", few_or_full(METHODS, lambda method: method in (TLI, COUPLED, SLEM)), ids=lambda method: method.name
)


@pytest.mark.parametrize(
    ("number", "pattern"),
    few_or_full(itertools.product(range(len(METHODS)), PATTERNS), lambda given: given[1] in FEW[given[0] % 2 :: 2]),
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


@pytest.mark.parametrize(
    ("toy", "method"),
    few_or_full(PAIRS, lambda pair: (TOYS.index(pair[0]) + PAIRED.index(pair[1])) % 4 == 0)
    + [(toy, COUPLED) for toy in toys.TEXTS],
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
    given = Overlapped(TWO, method, (Choice(2, 1),), Schedule(pattern), 4, 1, unwanted=1)
    runs = replace(given, choices=(PLAIN, Choice(2, 2, overlap=False)), unwanted=0, interrupts=True)
    assert max(error(given), error(runs)) < EXACT


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


class SeededTarget(ToyTarget):
    """Answers nodes with keyed draws, as the service does."""

    def __init__(self, vocabulary: Vocabulary, key: NoiseKey, noise: KeyedNoise) -> None:
        super().__init__(vocabulary.size, 99, NO_CHOICE)
        self._vocabulary, self._key, self._noise = vocabulary, key, noise

    def _sample(self, path: tuple[int, ...]) -> Sample:
        offset = len(self._vocabulary.letters_of(path))
        return Sample(self._noise.draw(toys.as_ids(*range(self.size)), self.distribution(path), self._key, offset), 0.0)


class SeededDrafter(ToyDrafter):
    """Draws with the target's noise, as the service does."""

    def __init__(self, vocabulary: Vocabulary, key: NoiseKey, noise: KeyedNoise) -> None:
        super().__init__(vocabulary.letters, NO_CHOICE)
        self._key, self._noise = key, noise

    def propose(self) -> DraftToken:
        row = self.distribution(self.text)
        token = self._noise.draw(row.ids, row.probabilities, self._key, len(self.text))
        self.text = type(self.text)(self.text + self.letters[token])
        return DraftToken(token)


class Runs:
    """Sessions over one pair of toys; the noise of a vocabulary is made once."""

    def __init__(self, toy: Toy) -> None:
        self.pair = pair_of(toy.target, toy.drafter, toy.stops)
        self.noises = KeyedNoise.of(self.pair.target), KeyedNoise.of(self.pair.drafter)

    def output(self, seed: int, draft_tokens: int) -> tuple[int, ...]:
        """The output for a seed; without draft tokens there is no drafter."""
        asked = {"pair": self.pair, "chooser": NO_CHOICE, "max_tokens": LENGTH}
        given = assignment(SEEDED, drafts=draft_tokens > 0, controller=lock_step(draft_tokens or 1), **asked)
        return tuple(one.token for one in run_session(Session(given), *self.services(seed)).emitted)

    def services(self, seed: int) -> tuple[SeededTarget, SeededDrafter]:
        """Both sides, which draw with the noise of a seed."""
        key, (target, drafter) = NoiseKey(seed), self.noises
        return SeededTarget(self.pair.target, key, target), SeededDrafter(self.pair.drafter, key, drafter)

    def play(self, given: Overlapped, seed: int) -> Stage:
        """An overlapped session of the same toys, played to its end."""
        stage = given.stage(NO_CHOICE)
        target, drafter = self.services(seed)
        stage.replace_toys(target, lambda: copy.copy(drafter))
        given.schedule.play(stage)
        return stage


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.name)
def test_the_output_is_a_function_of_the_seed(toy: Toy) -> None:
    runs = Runs(toy)
    for seed in range(10):
        assert len({runs.output(seed, draft_tokens) for draft_tokens in (0, 1, 2, 3)}) == 1


@cache
def outputs(toy: Toy) -> Counter[tuple[int, ...]]:
    """Those of all seeds."""
    runs = Runs(toy)
    return Counter(runs.output(seed, 2) for seed in range(SEEDS))


@pytest.mark.parametrize("toy", few_or_full(TOYS, lambda toy: toy is NESTED), ids=lambda toy: toy.name)
def test_over_seeds_the_distribution_is_the_targets(toy: Toy) -> None:
    wanted = autoregressive_distribution(ToyTarget(len(toy.target), 99), toy.stops, LENGTH)
    assert outputs(toy).keys() <= wanted.keys()
    assert p_value(outputs(toy), wanted) > SMALLEST_P


def test_noise_of_another_distribution_is_seen() -> None:
    """The test has teeth: the same outputs judged against the distribution of another target."""
    other = autoregressive_distribution(ToyTarget(len(NESTED.target), 99, salt="another"), NESTED.stops, LENGTH)
    assert p_value(outputs(NESTED), other) < SMALLEST_P


def p_value(seen: Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float]) -> float:
    """Chi-square against a distribution."""
    return fit_of({place: seen[output] for place, output in enumerate(wanted)}, np.array([*wanted.values()])).p


@dataclass(frozen=True)
class Peeking(Schedule):
    """Holds a draft token back, until patience has ended, because of its letters."""

    held: list[Reply] = field(default_factory=list)

    def possible(self, stage: Stage, act: toys.Act) -> bool:
        for lane, drafter in stage.drafters.items():
            if act is toys.Act.DRAFT and (self.held or drafter.owes):
                reply = self.held.pop() if self.held else drafter.reply()
                if isinstance(reply, Drafted) and reply.draft_tokens[0].token != 0 and Timer.STALL in stage.timers:
                    self.held.append(reply)
                    stage.expire(Timer.STALL)
                else:
                    stage.tell(Replied(lane, reply))
                return True
        return act is not toys.Act.DRAFT and super().possible(stage, act)

    def play(self, stage: Stage) -> None:
        self.held.clear()
        super().play(stage)


@dataclass(frozen=True)
class Limited(Overlapped):
    """The request's limits leave nothing to draw after some outputs: one that goes there ends with an error."""

    ends: frozenset[tuple[int, ...]] = frozenset({(1,), (0, 0), (0, 1, 0)})

    def target(self, chooser: Chooser | None) -> ToyTarget:
        return LimitedTarget(len(self.toy.target), self.head, chooser, salt=self.salt, ends=self.ends)


@pytest.mark.parametrize("method", [*METHODS, SLRS], ids=lambda method: method.name)
def test_a_draft_that_leads_where_nothing_can_be_drawn_changes_no_distribution(method: Method) -> None:
    """Not that of errors, either."""
    toy, rounds = toys.SAME if method.same_vocabulary else NESTED, Choice(2, 2, overlap=False)
    given = [(rounds, "DT", 1), *([] if method is SLRS else [(Choice(2, 1), "DDT", 2)])]
    if FULL:
        choices = (rounds,) if method is SLRS else (rounds, Choice(2, 1), Choice(3, 0, patience=0))
        given = [*itertools.product(choices, FEW, (1, 2))]
    for choice, pattern, targets in given:
        limited = Limited(toy, method, (choice,), Schedule(pattern), 3, 1, targets=targets)
        assert error(limited) < EXACT, limited


def covers_but_what_ends_next(self: Answers, path: tuple[int, ...]) -> bool:
    """A block ends before a draft token that leads where nothing can be drawn, which is not revealed yet."""
    following = self._own[1][: len(path) + 1]
    return COVERS(self, path) and (len(following) == len(path) or COVERS(self, following))


def test_a_block_that_ends_before_such_a_draft_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = frozenset((*path, 0) for path in itertools.product(range(2), repeat=2))
    limited = Limited(LETTERS, TLI, (Choice(2, 2, overlap=False),), Schedule("DT"), 4, 1, salt="t7", ends=ends)
    assert error(limited) < EXACT
    monkeypatch.setattr(Answers, "covers", covers_but_what_ends_next)
    assert bias(limited) > BIASED


@named
def test_a_schedule_that_peeks_is_seen(method: Method) -> None:
    """But by `slem`: its output does not depend on the draft, whoever looks at it."""
    given = Overlapped(toys.SAME, method, (Choice(1, 0, patience=1.0),), Schedule("TD"), 2)
    peeked = replace(given, schedule=Peeking("TD"))
    assert error(given) < EXACT
    assert error(peeked) < EXACT if method is SLEM else bias(peeked) > BIASED


def over_at_a_judged_need(self: Session, need: NeedRow) -> bool:
    moved = len(self.output.text) > self.epoch.began
    return self.epoch.exhausted and not self.drafter.due and moved and self.target.answers.held is None


def test_a_drafter_that_opens_and_ends_a_judged_need_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [Overlapped(NESTED, TLI, (Choice(2, 1),), Schedule("T", opens=opens), 2, 1) for opens in range(1, 6)]
    assert max(map(error, given)) < EXACT
    monkeypatch.setattr(Session, "interruptible", property(lambda self: not self.epoch.choice.drafts))
    assert max(map(bias, given)) > BIASED


def only_first(match: Callable[..., Branch | None]) -> Callable[..., Branch | None]:
    """Adopts a branch only if it begins with the first id."""

    def peeking(self: Branches, epoch: Epoch, text: Letters, letters_decide: bool) -> Branch | None:
        found = match(self, epoch, text, letters_decide)
        return found if found is not None and found.tokens[0] == 0 else None

    return peeking


def follow_the_draft(self: Session) -> list[Command]:
    """Beyond a refusal emits what the tree has, whatever the target has drawn there."""
    commands: list[Command] = []
    while self.state is State.RUNNING and self.target.answers.sample is not None:
        likely = [token for token in range(2) if self.target.answers.after((token,)) is not None]
        commands += self._emit(likely[0] if likely else self.target.answers.sample.token, Kind.ACCEPTED)
    return commands


@pytest.mark.parametrize(
    ("given", "part", "name", "broken"),
    [
        (NARROW, Session, "_over", over_at_a_judged_need),
        (Overlapped(LETTERS, SLEM, (TREE,), Schedule("DT"), 4, 1), Session, "_emit_known", follow_the_draft),
        *((replace(ADOPTED, method=one), Branches, "match", only_first(MATCH)) for one in (STANDARD, TLI, COUPLED)),
    ],
    ids=lambda value: value.method.name if isinstance(value, Overlapped) else getattr(value, "__name__", str(value)),
)
def test_a_session_that_is_broken_is_seen(given, part, name, broken, monkeypatch):
    """An epoch ends where a judged row is missing; a tree is followed where the target did not go; a branch is adopted
    for what it hides. So passes do go on beyond refusals, and continuations are adopted: else it would not be seen."""
    assert error(given) < EXACT
    monkeypatch.setattr(part, name, broken)
    assert bias(given) > BIASED
