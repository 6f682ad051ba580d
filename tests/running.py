"""A session from its first command to its last, over toys that answer at once."""

from crossdraft.session.events import Command, Emitted, Finished, Open, Ready, Replied, Reply, Send
from crossdraft.session.session import Session
from crossdraft.types.messages import Advance, Draft, FetchRow, Pass, Score
from tests.fakes import ToyDrafter, ToyTarget


def run_session(session: Session, target: ToyTarget, drafter: ToyDrafter | None) -> list[Command]:
    """Carry out a session's commands with toys until it is finished; returns what it emitted and its end."""
    out: list[Command] = []
    waiting = session.start(0.0)
    while waiting:
        command = waiting.pop(0)
        match command:
            case Open(lane):
                waiting += session.handle(Ready(lane), 0.0)
            case Send(lane, request):
                for reply in answers(request, target, drafter):
                    waiting += session.handle(Replied(lane, reply), 0.0)
            case Emitted() | Finished():
                out.append(command)
    return out


def answers(request: object, target: ToyTarget, drafter: ToyDrafter | None) -> list[Reply]:
    """What the toys say to a request, all of it."""
    match request:
        case Pass():
            return [target.run(request)]
        case FetchRow():
            return [target.fetch(request)]
    assert drafter is not None
    match request:
        case Draft():
            return [drafter.draft(request)]
        case Advance():
            return [drafter.more(request)]
        case Score():
            return [drafter.score(request)]
    raise AssertionError(request)
