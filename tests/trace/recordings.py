"""The steps of sessions over toys, without files and without waiting."""

from crossdraft.session.events import Command, Event
from crossdraft.session.session import Session
from crossdraft.speculation.choice import Controller
from crossdraft.trace.timeline import Step, Watch
from tests.clock import Run, World


class Keeper(Watch):
    """Keeps the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    def record(self, step: Step) -> None:
        """Takes no spans."""
        self.steps.append(step)


class Recorded:
    """A session that keeps its steps; each takes a millisecond."""

    def __init__(self, session: Session) -> None:
        self.steps: list[Step] = []
        self._session = session

    @property
    def counts(self) -> object:
        return self._session.counts

    def start(self, now: float) -> list[Command]:
        return self._kept(None, now, self._session.start(now))

    def handle(self, event: Event, now: float) -> list[Command]:
        return self._kept(event, now, self._session.handle(event, now))

    def _kept(self, event: Event | None, now: float, commands: list[Command]) -> list[Command]:
        self.steps.append(Step(now, event, tuple(commands), 0.001, self._session.counts.row_misses))
        return commands


def virtual_steps(world: World, controller: Controller) -> list[Step]:
    """Those of a session on a virtual clock, from its first command to its last."""
    run = Run(world, controller)
    recorded = Recorded(run.session)
    run.session = recorded  # type: ignore[assignment]
    run.run()
    return recorded.steps
