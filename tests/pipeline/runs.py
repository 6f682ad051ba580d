"""Sessions without a drafter, and what a target tells them of its runs."""

from crossdraft.session.events import Command, Ready, Replied
from crossdraft.session.session import Session
from crossdraft.types.messages import Pass, PassDone, Sample
from crossdraft.verification.methods import TLI, Method
from tests.pipeline.sessions import TARGET, assignment, emitted, requests


def told(*tokens: int, first: int = 0, number: int = 1, more: bool = True, lane: int = TARGET) -> Replied:
    samples = tuple(Sample(token, -0.5) for token in tokens)
    return Replied(lane, PassDone(number, samples, 0.01, more=more, forwards=len(tokens), first=first))


def alone(method: Method = TLI, **changes: object) -> tuple[Session, Pass]:
    """A session without any drafter, and its first pass."""
    session = Session(assignment(method, drafts=False, **changes))
    session.start(0.0)
    (sent,) = requests(session.handle(Ready(TARGET), 0.0))
    assert isinstance(sent, Pass)
    return session, sent


def tokens_of(out: list[Command]) -> list[int]:
    return [one.token for one in emitted(out)]
