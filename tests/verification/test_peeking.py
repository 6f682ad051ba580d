"""The comparison of distributions has teeth: it fails when a schedule peeks at what is drawn and hidden, and when a
session is broken on purpose."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from crossdraft.session.drafter_side import Branches
from crossdraft.session.epoch import Epoch
from crossdraft.session.events import Command, Replied, Reply, Timer
from crossdraft.session.session import Session
from crossdraft.speculation.choice import Choice
from crossdraft.text.letters import Letters
from crossdraft.types.messages import Branch, Drafted
from crossdraft.types.statistics import Kind
from crossdraft.verification.methods import COUPLED, COUPLED_SHARED, RDK, SLEM, STANDARD, TLI, Method
from crossdraft.verification.walk import NeedRow
from tests.clock import Stage
from tests.verification.scheduling import Act, Overlapped, Schedule
from tests.verification.test_overlapped_distributions import LETTERS, TREE
from tests.verification.toys import EXACT, NESTED, SAME, bias, error

BIASED = 0.01  # total variation


@dataclass(frozen=True)
class Peeking(Schedule):
    """Holds a draft token back, until patience has ended, because of its letters."""

    held: list[Reply] = field(default_factory=list)

    def possible(self, stage: Stage, act: Act) -> bool:
        for lane, drafter in stage.drafters.items():
            if act is Act.DRAFT and (self.held or drafter.owes):
                reply = self.held.pop() if self.held else drafter.reply()
                if isinstance(reply, Drafted) and reply.draft_tokens[0].token != 0 and Timer.STALL in stage.timers:
                    self.held.append(reply)
                    stage.expire(Timer.STALL)
                else:
                    stage.tell(Replied(lane, reply))
                return True
        return act is not Act.DRAFT and super().possible(stage, act)

    def play(self, stage: Stage) -> None:
        self.held.clear()
        super().play(stage)


@pytest.mark.parametrize("method", [STANDARD, TLI, COUPLED, COUPLED_SHARED, RDK], ids=lambda method: method.name)
def test_a_schedule_that_peeks_is_seen(method: Method) -> None:
    given = Overlapped(SAME, method, (Choice(1, 0, patience=1.0),), Schedule("TD"), 2)
    assert error(given) < EXACT
    assert bias(replace(given, schedule=Peeking("TD"))) > BIASED


def test_peeking_does_not_matter_where_the_target_draws() -> None:
    """The output of `slem` does not depend on the draft, whoever looks at it."""
    assert error(Overlapped(SAME, SLEM, (Choice(1, 0, patience=1.0),), Peeking("TD"), 2)) < EXACT


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
    while self._finished is None and self.target.answers.sample is not None:
        likely = [token for token in range(2) if self.target.answers.after((token,)) is not None]
        commands += self._emit(likely[0] if likely else self.target.answers.sample.token, Kind.ACCEPTED)
    return commands


ADOPTED = Overlapped(LETTERS, TLI, (Choice(1, 1, branch_depth=1),), Schedule("DT"), 3, salt="t7")


@pytest.mark.parametrize(
    ("given", "part", "name", "broken"),
    [
        (
            Overlapped(NESTED, COUPLED, (Choice(2, 2),), Schedule("DDT"), 3, paths=1),
            Session,
            "_over",
            over_at_a_judged_need,
        ),
        (Overlapped(LETTERS, SLEM, (TREE,), Schedule("DT"), 4, 1), Session, "_emit_known", follow_the_draft),
        *(
            (replace(ADOPTED, method=one), Branches, "match", only_first(Branches.match))
            for one in (STANDARD, TLI, COUPLED)
        ),
    ],
    ids=lambda value: value.method.name if isinstance(value, Overlapped) else getattr(value, "__name__", str(value)),
)
def test_a_session_that_is_broken_is_seen(given, part, name, broken, monkeypatch):
    """An epoch ends where a judged row is missing; a tree is followed where the target did not go; a branch is adopted
    for what it hides."""
    assert error(given) < EXACT
    monkeypatch.setattr(part, name, broken)
    assert bias(given) > BIASED
