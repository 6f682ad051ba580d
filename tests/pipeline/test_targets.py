"""Targets that come and go."""

from dataclasses import replace

from crossdraft.pipeline.events import Command, Finished, Lost, Open, Ready, Reason, Send
from crossdraft.pipeline.session import Session
from crossdraft.verification.exchange import Pass
from tests.pipeline.sessions import assignment

ERROR = ConnectionError("gone")


def of_kind(commands: list[Command], kind: type) -> list[Command]:
    return [command for command in commands if isinstance(command, kind)]


def test_a_target_that_opens_and_never_brings_a_pass_is_given_up() -> None:
    session = Session(replace(assignment(drafts=False), target_seconds=10.0))
    now, commands = 0.0, session.start(0.0)
    for _ in range(100):
        (opening,) = of_kind(commands, Open)
        assert isinstance(opening, Open)
        now += opening.after + 0.1
        (sent,) = of_kind(session.handle(Ready(opening.lane), now), Send)
        assert isinstance(sent, Send)
        assert isinstance(sent.request, Pass)
        commands = session.handle(Lost(opening.lane, ERROR), now)
        if of_kind(commands, Finished):
            break
    (end,) = of_kind(commands, Finished)
    assert end == Finished(Reason.FAILED, session.counts, ERROR)
    assert 10.0 <= now < 13.0


def test_a_lane_that_no_service_can_have_is_dropped_while_another_lives() -> None:
    session = Session(replace(assignment(drafts=False), targets=2))
    first, second = of_kind(session.start(0.0), Open)
    assert isinstance(first, Open)
    assert isinstance(second, Open)
    session.handle(Ready(first.lane), 0.0)
    assert session.handle(Lost(second.lane, ERROR, elsewhere=False), 0.1) == []
    (end,) = session.handle(Lost(first.lane, ERROR, elsewhere=False), 0.2)
    assert end == Finished(Reason.FAILED, session.counts, ERROR)
