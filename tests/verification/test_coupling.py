"""`coupled`: what it accepts, what it asks for, and that mistakes in it are seen."""

from collections.abc import Iterable

import numpy as np
import pytest

from crossdraft.text.pairs import Pair
from crossdraft.types.rows import DraftToken, Ids, Probabilities, Row
from crossdraft.types.statistics import Kind
from crossdraft.verification import coupling, planning
from crossdraft.verification.coupling import Identity
from crossdraft.verification.methods import COUPLED, COUPLED_SHARED, SLEM, STANDARD, TLI, Method
from crossdraft.verification.walk import Answer, Emit, Ground, NeedDraftToken, NeedRow, NeedSample, Refused, WalkStep
from tests.tables import ToyDrafter, ToyTarget, pair_of
from tests.verification.enumerating import EnumeratingChooser, distribution_of
from tests.verification.toys import EXACT, NESTED, SAME, TEXTS, TOYS, Setup, Toy, as_ids, bias, mean


@pytest.mark.parametrize("method", [COUPLED, COUPLED_SHARED], ids=lambda method: method.name)
def test_over_one_vocabulary_it_accepts_what_rejection_sampling_does(method: Method) -> None:
    """Of one draft token; of more, rejection sampling in blocks may accept more."""
    for letters in (("a", "b", "c"), ("a", "b", "aa"), ("a", "a", "b"), ("aa", "ab", "b")):
        toy = Toy("one vocabulary", letters, letters)
        both = [mean(Setup(toy, one, 1, 2), "accepted") for one in (method, STANDARD)]
        if letters == ("a", "b", "c"):
            assert both[0] == pytest.approx(both[1], abs=1e-12)
        assert both[0] >= both[1] - 1e-12


@pytest.mark.parametrize("toy", TOYS, ids=lambda toy: toy.name)
def test_over_shared_tokens_it_accepts_at_least_what_tli_does(toy: Toy) -> None:
    """Of one token, whatever the distributions are; later ones are others after another number of tokens."""
    first = [Setup(toy, method, 2, 2) for method in (COUPLED_SHARED, TLI)]
    distributions = [distribution_of(lambda chooser, one=one: one.played(chooser).emitted[0].kind) for one in first]
    assert distributions[0].get(Kind.ACCEPTED, 0) >= distributions[1].get(Kind.ACCEPTED, 0) - 1e-12


def greedy_verdicts(toy: Toy, method: Method, salt: str) -> list[WalkStep]:
    """What a walk decides of a greedy draft, until it is refused or used up after six draft tokens."""
    pair, chooser = pair_of(toy.target, toy.drafter), EnumeratingChooser([])
    target = ToyTarget(len(toy.target), 99, temperature=0, salt=salt)
    drafter = ToyDrafter(pair.drafter.letters, chooser, temperature=0, salt=salt)
    output, decided = list[int](), list[WalkStep]()
    walk, left = method.walk(Ground(pair, chooser)), 6
    step, answer = next(walk), None
    while not isinstance(step, Refused):
        match step:
            case NeedRow(known=True):  # no pass has looked ahead
                answer = None
            case NeedDraftToken():
                if not left:
                    return decided
                left, answer = left - 1, drafter.propose()
            case NeedRow() | NeedSample():
                token = int(target.distribution(tuple(output)).argmax())
                answer = Row.certain(token) if isinstance(step, NeedRow) else token
            case Emit(token):
                output.append(token)
                decided.append(step)
        step = walk.send(answer)
    return [*decided, step]


@pytest.mark.parametrize("toy", [*TOYS, *TEXTS], ids=lambda toy: toy.name)
def test_temperature_zero_is_a_comparison_of_texts(toy: Toy) -> None:
    for salt in range(20):
        verdicts = [greedy_verdicts(toy, method, str(salt)) for method in (COUPLED, SLEM)]
        assert verdicts[0] == verdicts[1]


def conversation(pair: Pair, answers: Iterable[Answer], script: list[int]) -> list[WalkStep]:
    """The steps of a walk that is given these answers to what it needs, and the branches of its choices."""
    waiting = iter(answers)
    walk = coupling.walk(Ground(pair, EnumeratingChooser(script)))
    steps = [next(walk)]
    while not isinstance(steps[-1], Refused):
        known = isinstance(steps[-1], NeedRow) and steps[-1].known  # no pass has looked ahead
        answer = None if known or isinstance(steps[-1], Emit) else next(waiting, ...)
        if answer is ...:
            break
        steps.append(walk.send(answer))
    return steps


def shown(steps: Iterable[WalkStep]) -> list[object]:
    """Steps as plain values."""
    plain: list[object] = []
    for step in steps:
        if isinstance(step, NeedRow) and not step.known:
            plain.append(("row", step.listed.tolist(), step.judging, step.whole))
        elif not isinstance(step, NeedRow):
            plain.append("draft_token" if isinstance(step, NeedDraftToken) else step)
    return plain


FIRST, SECOND = Row.certain(0), Row.certain(1)
ROW = ("row", [], True, False)
CONVERSATIONS: dict[str, tuple[Pair, list[Answer], list[int], list[object]]] = {
    "inside a draft token the head is enough": (  # the target says `a`, then `b`; the draft's token is `ab`
        pair_of(("a", "b"), ("ab", "a")),
        [DraftToken(0, FIRST), FIRST, SECOND],
        [],
        ["draft_token", ROW, Emit(0, Kind.ACCEPTED), ROW, Emit(1, Kind.ACCEPTED), "draft_token"],
    ),
    "at a token's start it lists what the draft token could have been": (
        pair_of(("b", "c", "a"), ("a", "b", "ab")),
        [DraftToken(1, Row(as_ids(0, 1, 2), np.array([0.25, 0.5, 0.25])))],
        [],
        ["draft_token", ("row", [2, 0], True, False)],
    ),
    "the tail emits a token that no row lists, and refuses": (
        pair_of(("a", "b", "c"), ("a", "b")),
        [DraftToken(0, FIRST), Row(as_ids(0), np.array([0.5]), 0.5), Row(as_ids(0, 1, 2), np.array([0.5, 0.2, 0.3]))],
        [0, 0, 1],
        ["draft_token", ("row", [0], True, False), ("row", [], True, True), Emit(2, Kind.CORRECTED), Refused(0)],
    ),
    # The target says `aba` while the draft has only shown `a`; a later `ba` is then at the frontier.
    "without a draft token it finishes its token and waits for the draft": (
        pair_of(("aba", "c"), ("a", "ba")),
        [DraftToken(0, FIRST), FIRST, None, DraftToken(1, SECOND), None],
        [],
        ["draft_token", ROW, "draft_token", Emit(0, Kind.BONUS), *["draft_token"] * 2, ("row", [], False, False)],
    ),
    "a draft that disagrees with committed letters is refused there": (
        pair_of(("aba", "c"), ("a", "bb")),
        [DraftToken(0, FIRST), FIRST, None, DraftToken(1, SECOND)],
        [],
        ["draft_token", ROW, "draft_token", Emit(0, Kind.BONUS), "draft_token", Refused(2)],
    ),
    "... also by its second token after them": (
        pair_of(("aba", "c"), ("a", "b")),
        [DraftToken(0, FIRST), FIRST, None, DraftToken(1, SECOND), DraftToken(1, SECOND)],
        [],
        ["draft_token", ROW, "draft_token", Emit(0, Kind.BONUS), *["draft_token"] * 2, Refused(2)],
    ),
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_what_it_asks_for_and_decides(name: str) -> None:
    pair, answers, script, wanted = CONVERSATIONS[name]
    assert shown(conversation(pair, answers, script)) == wanted


def test_distributions_that_a_refusal_leaves_unchanged_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def unchanged(identity: Identity) -> tuple[Probabilities, Probabilities]:
        return identity._row.probabilities, identity._draft_row.probabilities

    setup = Setup(NESTED, COUPLED, 2, 2)
    assert bias(setup) < EXACT
    monkeypatch.setattr(Identity, "residuals", unchanged)
    assert bias(setup) > 0.01


def test_listing_the_drafted_token_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its probability would be known because it was drawn."""

    def drafted_alone(pair: Pair, draft_token: DraftToken) -> Ids:
        ids = pair.to_target_ids(as_ids(draft_token.token))
        return ids[ids >= 0]

    class OfWhatIsListed(Identity):
        def __init__(self, pair: Pair, row: Row, draft_token: DraftToken) -> None:
            super().__init__(pair, row, draft_token)
            self._drafted = np.where(row.places(self._drafted) < 0, -1, self._drafted)

    setup = Setup(SAME, COUPLED, 2, 2, head=1)
    assert bias(setup) < EXACT
    monkeypatch.setattr(planning, "target_support", drafted_alone)
    monkeypatch.setattr(coupling, "target_support", drafted_alone)
    with pytest.raises(KeyError):
        bias(setup)
    monkeypatch.setattr(coupling, "Identity", OfWhatIsListed)
    assert bias(setup) > 0.01
