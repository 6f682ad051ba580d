"""Sessions over toys, brought to each of the states in which they wait."""

import numpy as np

from crossdraft.pipeline.assignment import Assignment
from crossdraft.pipeline.events import DrafterOpened, Emitted, Finished, SetTimer, TargetOpened
from crossdraft.pipeline.session import Session
from crossdraft.text.letters import NOTHING
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.exchange import (
    Draft,
    Drafted,
    NoiseKey,
    OpenTarget,
    Pass,
    PassDone,
    SamplingOptions,
    Score,
)
from crossdraft.verification.methods import SLEM, SLRS, TLI, Method
from crossdraft.verification.rows import Proposal, Row
from tests.fakes import ToyDrafter, ToyTarget, greedy_tokens, open_drafter, pair_of

LETTERS = ("a", "b", "ab")


def assignment(method: Method = SLEM, *, drafts: bool = True, **changes: object) -> Assignment:
    pair = pair_of(LETTERS, ("a", "b", "ba"))
    fields: dict[str, object] = {
        "pair": pair,
        "method": method,
        "chooser": RandomChooser(np.random.default_rng(1)),
        "encode": greedy_tokens(pair.target),
        "open_target": OpenTarget((0, 1), SamplingOptions(), NoiseKey(1) if method.samples else None),
        "open_drafter": open_drafter(NOTHING, None) if drafts else None,
        "proposals": 3,
        "max_tokens": 12,
        "context": 100,
    }
    return Assignment(**(fields | changes))  # type: ignore[arg-type]


def toys(method: Method = SLEM) -> tuple[ToyTarget, ToyDrafter]:
    chooser = RandomChooser(np.random.default_rng(2))
    allowed = np.array([0, 1]) if method.shared_only else None
    target = ToyTarget(len(LETTERS), 99, chooser if method.samples else None)
    return target, ToyDrafter(pair_of(LETTERS, ("a", "b", "ba")).drafter.letters, chooser, allowed)


def started() -> Session:
    """A session that waits for its services."""
    session = Session(assignment())
    session.start()
    return session


def drafting() -> tuple[Session, Draft]:
    """A session that waits for proposals."""
    session = Session(assignment())
    session.start()
    session.handle(TargetOpened())
    draft, _ = session.handle(DrafterOpened())
    assert isinstance(draft, Draft)
    return session, draft


def passing() -> tuple[Session, Pass]:
    """A session that waits for a pass."""
    session, draft = drafting()
    (sent,) = session.handle(toys()[1].draft(draft))
    assert isinstance(sent, Pass)
    return session, sent


def fetching() -> Session:
    """A session that waits for a whole row: the head that came lacks an id that the walk needs."""
    session = Session(assignment(TLI))
    session.start()
    session.handle(TargetOpened())
    session.handle(DrafterOpened())
    sent = session.handle(Drafted(1, (Proposal(0, Row.certain(0)),), 0.0))[0]
    assert isinstance(sent, Pass)
    short = Row(np.array([1]), np.array([0.5]), 0.5)
    session.handle(PassDone(1, (short,) * (1 + len(sent.tree)), 0.0))
    return session


def scoring() -> tuple[Session, Score]:
    """A session that waits for scores: "b" is the first piece of its draft, and nothing longer begins with it."""
    session = Session(assignment(SLRS))
    session.start()
    session.handle(TargetOpened())
    session.handle(DrafterOpened())
    (sent,) = session.handle(Drafted(1, (Proposal(1, Row.certain(1)), Proposal(0, Row.certain(0))), 0.0))
    assert isinstance(sent, Pass)
    whole = Row(np.array([0, 1, 2]), np.array([0.2, 0.5, 0.3]))
    score, timer = session.handle(PassDone(1, (whole,) * (1 + len(sent.tree)), 0.0))
    assert isinstance(score, Score)
    assert timer == SetTimer(2, 30.0)
    return session, score


def emitted(out: list[object]) -> list[Emitted]:
    return [command for command in out if isinstance(command, Emitted)]


def end(out: list[object]) -> Finished:
    assert isinstance(out[-1], Finished)
    return out[-1]
