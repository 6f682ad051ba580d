"""A session from its first command to its last, over toys."""

from crossdraft.pipeline.events import Command, DrafterOpened, Emitted, Finished, SetTimer, TargetOpened
from crossdraft.pipeline.session import Session
from crossdraft.verification.exchange import Draft, FetchRow, OpenDrafter, OpenTarget, Pass, Score
from tests.fakes import ToyDrafter, ToyTarget


def run_session(session: Session, target: ToyTarget, drafter: ToyDrafter | None) -> list[Command]:
    """Carry out a session's commands with toys until it is finished; returns what it emitted and its end."""
    out: list[Command] = []
    waiting = session.start()
    while waiting:
        command = waiting.pop(0)
        match command:
            case OpenTarget():
                waiting += session.handle(TargetOpened())
            case OpenDrafter():
                waiting += session.handle(DrafterOpened())
            case Draft():
                assert drafter is not None
                waiting += session.handle(drafter.draft(command))
            case Score():
                assert drafter is not None
                waiting += session.handle(drafter.score(command))
            case Pass():
                waiting += session.handle(target.run(command))
            case FetchRow(number, node):
                waiting += session.handle(target.fetch(number, node))
            case SetTimer():
                pass
            case Emitted() | Finished():
                out.append(command)
    return out
