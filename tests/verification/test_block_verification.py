"""Block verification: never fewer accepted draft tokens than token by token, and what breaks its distribution. That
whole sessions are exact is enumerated with all methods (test_exact_distributions, test_overlapped_distributions)."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdraft.speculation.choice import Choice
from crossdraft.types.rows import DraftToken, Row
from crossdraft.types.statistics import Kind
from crossdraft.verification import rejection
from crossdraft.verification import walk as walks
from crossdraft.verification.chooser import Chooser
from crossdraft.verification.methods import STANDARD, TLI, Method
from crossdraft.verification.rejection import Block
from crossdraft.verification.walk import Answer, Emit, Ground, NeedDraftToken, NeedRow, Refused, Walk, WalkStep
from tests.tables import pair_of
from tests.verification.enumerating import EnumeratingChooser, distribution_of
from tests.verification.test_overlapped_distributions import LETTERS
from tests.verification.toys import EXACT, SAME, Overlapped, Schedule, Setup, as_ids, bias, error

BIASED = 0.002  # total variation
SEEDS = st.integers(0, 2**32 - 1)
Ends = Callable[[NeedDraftToken, DraftToken], bool]


@dataclass(frozen=True)
class Models:
    """A target's and a drafter's next-token distributions by the tokens before; of more tokens the last decides."""

    target: np.ndarray  # float64 (contexts, tokens)
    drafter: np.ndarray  # float64 (contexts, tokens)
    head: int = 99  # most probable ids that a row of the target lists, besides the drafter's

    def rows(self, path: tuple[int, ...]) -> tuple[Row, Row]:
        """p and q after a path; q lists the ids that it gives any probability."""
        context = (path[-1] + 1) % len(self.target) if path else 0
        p, q = self.target[context], self.drafter[context]
        ids = np.union1d(np.argsort(-p, kind="stable")[: self.head], np.flatnonzero(q))
        return Row(ids, p[ids], max(0.0, 1.0 - float(p[ids].sum()))), Row(np.flatnonzero(q), q[q > 0])

    def accepted(self, count: int, chooser: Chooser) -> int:
        """How many draft tokens of a block of `count` are accepted."""
        block = Block()
        for _ in range(count):
            p, q = self.rows(block.path)
            block.add(int(q.ids[chooser.categorical(q.probabilities)]), p, q)
        judging = block.accepted(chooser)
        try:
            need = next(judging)
            while True:
                need = judging.send(self.rows(need.path)[0])
        except StopIteration as end:
            return int(end.value)

    def in_blocks(self, count: int) -> list[float]:
        """The probability that at least 1 ... `count` draft tokens are accepted, by enumeration."""
        found = distribution_of(lambda chooser: self.accepted(count, chooser))
        return [sum(chance for number, chance in found.items() if number >= least) for least in range(1, count + 1)]

    def token_by_token(self, count: int, path: tuple[int, ...] = ()) -> np.ndarray:
        """The same where each is accepted by itself, with min(1, p / q)."""
        if not count:
            return np.zeros(0)
        p, q = self.rows(path)
        reached = np.zeros(count)
        for token, chance in zip(q.ids.tolist(), q.probabilities.tolist(), strict=True):
            accepted = min(chance, p.probability(token))
            reached += accepted * np.append(1.0, self.token_by_token(count - 1, (*path, token)))
        return reached


# Distributions that do not depend on the tokens before: the example of the paper's first section.
EXAMPLE = Models(np.array([[1 / 3, 2 / 3]]), np.array([[2 / 3, 1 / 3]]))


def test_the_papers_example() -> None:
    """Of two draft tokens 11/9 are accepted in a block, 10/9 token by token; of 1 to 4 the gain grows."""
    counts = (1, 2, 3, 4)
    blocks, alone = ([sum(of(count)) for count in counts] for of in (EXAMPLE.in_blocks, EXAMPLE.token_by_token))
    assert (blocks[1], alone[1]) == pytest.approx((11 / 9, 10 / 9), abs=EXACT)
    gains = [one / other - 1 for one, other in zip(blocks, alone, strict=True)]
    assert gains == pytest.approx([0, 0.1, 0.184, 0.277], abs=0.001)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.sampled_from([(2, 4), (3, 3), (4, 2)]), st.sampled_from([0.2, 1.0, 5.0]), st.booleans())
def test_a_block_never_accepts_fewer(seed: int, shape: tuple[int, int], concentration: float, truncated: bool) -> None:
    """At least i draft tokens are accepted with at least the probability that they are token by token, for each i.
    Random distributions after each token, peaked and flat, some with draft tokens that the target never says and, in
    truncated rows, a tail."""
    size, count = shape
    rng = np.random.default_rng(seed)
    p, q = (rng.dirichlet(np.full(size, concentration), size + 1) for _ in range(2))
    q[rng.random(q.shape) < 0.2] = 0.0
    q[:, 0] += 0.1
    models = Models(p, q / q.sum(axis=1, keepdims=True), 1 if truncated else 99)
    assert (np.array(models.in_blocks(count)) >= models.token_by_token(count) - EXACT).all()


# What breaks the distribution is seen.


class IndependentEvents(Block):
    """Accepts with w_i instead of h_i."""

    def accepted(self, chooser: Chooser) -> Generator[WalkStep, Answer, int]:
        number = next((i for i in range(len(self.rows), 0, -1) if chooser.bernoulli(self.weights[i])), 0)
        if number < len(self.rows):  # as the correction needs it
            _, q = self.rows[number]
            p = yield from walks.target_row(q.ids, judging=True, path=self.path[:number])
            weight = self.weights[number]
            self.rows[number] = Row(p.ids, weight * p.probabilities, weight * p.tail), q
        return number


class Unweighed(Block):
    """Draws corrections from (p - q)+ instead of (w p - q)+."""

    def accepted(self, chooser: Chooser) -> Generator[WalkStep, Answer, int]:
        number = yield from super().accepted(chooser)
        if number < len(self.rows):
            (p, q), weight = self.rows[number], self.weights[number]
            self.rows[number] = Row(p.ids, p.probabilities / weight, p.tail / weight), q
        return number


class Unclipped(Block):
    """Weights without the minimum with 1."""

    def add(self, token: int | None, p: Row, q: Row) -> None:
        super().add(token, p, q)
        if token is not None:
            self.weights[-1] = self.weights[-2] * p.probability(token) / q.probability(token)


@pytest.mark.parametrize("broken", [IndependentEvents, Unweighed, Unclipped])
@pytest.mark.parametrize("method", [STANDARD, TLI], ids=lambda method: method.name)
def test_a_broken_rule_is_seen(broken: type[Block], method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = Setup(SAME, method, 2, 3)
    assert error(setup) < EXACT
    monkeypatch.setattr(rejection, "Block", broken)
    assert bias(setup) > BIASED


def ending(ends: Ends) -> Method:
    """`tli` whose blocks end where `ends` says so of the need and its answer."""

    def walk(ground: Ground) -> Walk:
        walking = rejection.walk(ground)
        step: WalkStep = next(walking)
        kept: Answer = None
        while True:
            if isinstance(step, NeedDraftToken) and kept is not None:
                answer, kept = kept, None
            else:
                answer = yield step
            if isinstance(step, NeedDraftToken) and step.path and isinstance(answer, DraftToken) and ends(step, answer):
                answer, kept = None, answer
            try:
                step = walking.send(answer)
            except StopIteration:
                return

    return replace(TLI, name="ending", walk=walk)


def test_a_block_may_end_by_what_is_revealed_but_not_by_what_is_hidden() -> None:
    revealed = ending(lambda need, _: need.path[-1] == 0)
    hidden = ending(lambda _, draft_token: draft_token.token == 0)
    for schedule in (None, Schedule("DDT")):
        for method, biased in ((revealed, False), (hidden, True)):
            run = Setup(SAME, method, 2, 3) if schedule is None else Overlapped(SAME, method, (Choice(2, 2),), schedule)
            assert (bias(run) > BIASED) if biased else (error(run) < EXACT)


@pytest.mark.parametrize("method", [STANDARD, TLI], ids=lambda method: method.name)
def test_overlapped_epochs_judge_in_blocks_as_well(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a pass covered, and the draft token after it: else the tests of their distribution would say nothing."""
    sizes: list[int] = []
    accepted = Block.accepted

    def counted(self: Block, chooser: Chooser) -> Generator[WalkStep, Answer, int]:
        sizes.append(len(self.rows))
        return (yield from accepted(self, chooser))

    monkeypatch.setattr(Block, "accepted", counted)
    Overlapped(LETTERS, method, (Choice(4, 2),), Schedule("DDDT"), 3, 1).run(EnumeratingChooser([]))
    assert max(sizes) > 1


def test_a_draft_token_outside_the_target_ends_its_block() -> None:
    """Nothing after it can be accepted, so that no further draft token is asked for."""
    walking = rejection.walk(Ground(pair_of(("a", "b"), ("a", "c")), EnumeratingChooser([])))
    assert next(walking) == NeedDraftToken()
    row = Row(as_ids(0, 1), np.array([0.5, 0.5]))
    need = walking.send(DraftToken(1, row))
    assert not need.listed.size
    assert isinstance(walking.send(row), NeedRow)  # for the correction
    assert walking.send(row) == Emit(1, Kind.CORRECTED)


@pytest.mark.parametrize(("token", "wrong"), [(0, None), (1, 0), (2, 1)], ids=["the same", "other", "beyond"])
def test_a_late_draft_token_is_compared_with_what_the_target_has_said(token: int, wrong: int | None) -> None:
    """One that goes on beyond it ends the epoch, too: no target token begins within a draft token."""
    walking = rejection.walk(Ground(pair_of(("a", "b", "ab"), ("a", "b", "ab")), EnumeratingChooser([])))
    assert next(walking) == NeedDraftToken()
    assert isinstance(walking.send(None), NeedRow)
    assert walking.send(Row.certain(0)) == Emit(0, Kind.BONUS)
    assert next(walking) == NeedDraftToken()
    assert walking.send(DraftToken(token)) == (NeedDraftToken() if wrong is None else Refused(wrong))


def test_an_accepted_block_asks_for_no_more_of_a_row_than_its_draft_tokens() -> None:
    """What a correction needs is fetched when there is one: each fetch is a round trip."""
    walking = rejection.walk(Ground(pair_of(("a", "b"), ("a", "b")), EnumeratingChooser([])))
    draft_token = DraftToken(0, Row(as_ids(0, 1), np.array([0.5, 0.5])))
    row = Row(as_ids(0), np.array([0.9]), 0.1)
    assert next(walking) == NeedDraftToken()
    first = walking.send(draft_token)
    assert first.listed.tolist() == [0]
    assert walking.send(row) == NeedDraftToken((0,))
    second = walking.send(draft_token)
    assert (second.listed.tolist(), second.path) == ([0], (0,))
    assert walking.send(row) == NeedDraftToken((0, 0))
    assert [walking.send(None), next(walking)] == [Emit(0, Kind.ACCEPTED)] * 2
