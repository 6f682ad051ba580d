"""Connects a session's state machine to its services, and measures it by lane. Decides nothing itself.

The driver carries out the session's commands and feeds back what happens as events. It has no task: whatever happens in
a lane (a session with one service) is handled at once, by the link that hears of it. Times are seconds of the monotonic
clock.
"""

import asyncio
import contextvars
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from crossdraft.client.roster import Roster, Services
from crossdraft.rpc.errors import Internal, ServiceError, Unreachable, name_of
from crossdraft.rpc.links import LinkSession, Traffic
from crossdraft.session import events
from crossdraft.session.ledger import Ledger
from crossdraft.session.session import Session
from crossdraft.trace.timeline import Step, Watch
from crossdraft.types.messages import OpenTarget, PromptScored
from crossdraft.types.statistics import BOUNDS, LaneFigures, Times, Trips

BLAMED = "blamed"  # why a lane was lost: its service sent a wrong reply


class LaneWatch:
    """The stop-watch of one lane."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.address = ""  # where its session is, once that is decided
        self.lost = ""  # why it was lost, as in `LaneFigures`
        self.traffic, self.ledger = Traffic(), Ledger()  # of its session, once that is open, which keeps its listener
        self.since: float | None = None  # when it was opened
        self._closed: float | None = None
        self._counts = [0] * (len(BOUNDS) + 1)
        self._trip_seconds = self._queued = self._model_seconds = 0.0

    def found(self, address: str) -> None:
        self.address = address

    def failed(self, why: str) -> None:
        """Only the first reason counts."""
        self.lost = self.lost or why

    def opened(self, session: LinkSession, now: float) -> None:
        self.traffic, self.ledger, self.since = session.traffic, session.ledger, now

    def closed(self, now: float) -> None:
        self._closed = now

    def answered(self, reply: events.Reply, now: float) -> None:
        """A reply came. Of a request's first one, time outside the model is wire, codecs and queues: a round trip."""
        seconds = getattr(reply, "seconds", 0.0)
        self._model_seconds += seconds
        asked = self.ledger.answered
        if asked is not None and asked.replies == 1:
            took = max(0.0, now - asked.at - seconds)
            self._counts[bisect_left(BOUNDS, took)] += 1
            self._trip_seconds += took
            self._queued += getattr(reply, "queued", 0.0)

    def figures(self, now: float) -> LaneFigures:
        trips = Trips(tuple(self._counts), self._trip_seconds, self._queued)
        end = now if self._closed is None else self._closed
        traffic, seconds = self.traffic, 0.0 if self.since is None else end - self.since
        return LaneFigures(
            role=self.role,
            address=self.address,
            bytes_sent=round(traffic.bytes_sent),
            bytes_received=round(traffic.bytes_received),
            trips=trips,
            lost=self.lost,
            model_seconds=self._model_seconds,
            codec_seconds=traffic.codec_seconds,
            open_seconds=seconds,
            idle_seconds=max(0.0, seconds - self.ledger.busy(end)),
        )


@dataclass(eq=False)
class ServiceLane:
    """A session with a service, and its listener: being opened, open, or over.

    It reports Ready and replies, or Lost. If the roster is empty the loss is not final: a service may still be added.
    """

    opening: events.Open  # the number of the lane, the first message, and in how many seconds it is sent
    roster: Roster[Any]  # of its role, of TargetClients or of DrafterClients
    report: Callable[..., None]  # is told what happens there
    take: Callable[["ServiceLane"], str]  # gives the address; raises ServiceError if none is left
    context: contextvars.Context  # in which the session is opened

    def __post_init__(self) -> None:
        self.blamed = False  # this generation does not use its service again
        self.live = True  # not over yet
        self.watch = LaneWatch(self.roster.role)
        self._session: LinkSession | None = None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.opening.after, self._begin, context=self.context)

    def _begin(self) -> None:
        try:
            address = self.take(self)
        except ServiceError as error:
            self.live = False
            may_come = not len(self.roster) and self.roster.replaced is None
            self.report(events.Lost(self.opening.lane, error.with_traceback(None), elsewhere=may_come))
            return
        self.watch.found(address)
        self._session = self.roster[address].begin(self.opening.request, self)

    def opened(self) -> None:
        assert self._session is not None
        self.watch.opened(self._session, time.monotonic())
        self.report(events.Ready(self.opening.lane))

    def received(self, reply: events.Reply) -> None:
        now = time.monotonic()
        self.watch.answered(reply, now)
        self.report(events.Replied(self.opening.lane, reply), now)

    def lost(self, error: ServiceError) -> None:
        self._fail(name_of(error))
        self._end()
        self.report(events.Lost(self.opening.lane, error, error.lost))

    def send(self, request: object) -> None:
        """Queue a request; never waits."""
        if self._session is not None:
            self._session.send(request)

    def close(self, blame: str = "") -> None:
        """End it; nothing is sent or reported any more. With `blame` its service is not used again."""
        self._timer.cancel()
        if self._session is not None:
            self._session.close()
            self._end()
        self.live = False
        if blame:
            self.blamed = True
            self._fail(BLAMED)

    def _fail(self, why: str) -> None:
        if self.watch.address:
            self.watch.failed(why)
            self.roster.failed(self.watch.address, time.monotonic())

    def _end(self) -> None:
        self._session, self.live = None, False
        self.watch.closed(time.monotonic())
        self.roster.give_back(self.watch.address)


TokenSink = Callable[[Sequence[events.Emitted] | PromptScored], None]


class Driver:
    """Runs one session from its first command to its last.

    `session`: not begun. `services`: where it may open lanes. `watches`: are told every step.
    """

    def __init__(self, session: Session, services: Services, watches: Sequence[Watch] = ()) -> None:
        self._session = session
        self._services = services
        self._watches = watches
        self._events: deque[tuple[events.Event, float]] = deque()  # with the time of each one's arrival
        self._handling = False
        self._lanes: dict[events.Lane, ServiceLane] = {}
        self._measured: list[LaneWatch] = []  # of all lanes
        # Each calls at this second of the loop's clock, which may be before it is due. A handle does not say: uvloop's
        # are of whole milliseconds, and those of the next one have no time.
        self._timers: dict[events.Timer, tuple[float, asyncio.Handle]] = {}
        self._due: dict[events.Timer, tuple[float, int]] = {}  # seconds of the loop's clock, and the number
        self._failures: dict[str, ServiceError] = {}  # by role, the latest
        self._began = self._ended = self._first_token = 0.0  # seconds of the monotonic clock
        self._verification = self._latest = 0.0  # seconds that all events took, and that the latest one did
        self._handled = 0  # events
        self._emit: TokenSink
        self._finished: asyncio.Future[events.Finished] | None = None  # None: not begun
        self._context: contextvars.Context  # sessions are opened in it: log lines name its request

    def times(self) -> Times:
        now = self._ended or time.monotonic()
        figures = tuple(watch.figures(now) for watch in self._measured)
        targets = [one for one in figures if one.role == "target"]
        of_targets = sum(one.bytes_sent + one.bytes_received for one in targets)
        return Times(
            seconds=now - self._began,
            first_token_seconds=max(0.0, self._first_token - self._began),
            wire_seconds=sum(one.trips.seconds for one in figures),
            verification_seconds=self._verification,
            bytes_sent=round(sum(watch.traffic.bytes_sent for watch in self._measured)),
            bytes_received=round(sum(watch.traffic.bytes_received for watch in self._measured)),
            events=self._handled,
            target_bytes=of_targets,
            drafter_bytes=sum(one.bytes_sent + one.bytes_received for one in figures) - of_targets,
            idle_seconds=sum(one.idle_seconds for one in targets),
            target_lane_seconds=sum(one.open_seconds for one in targets),
            lanes=figures,
        )

    @property
    def addresses(self) -> frozenset[str]:
        """Where it has open sessions now."""
        lanes = self._lanes.values()
        return frozenset(lane.watch.address for lane in lanes if lane.live and lane.watch.since is not None)

    async def run(self, emit: TokenSink) -> events.Finished:
        """Carry out commands and feed back events until the session is finished.

        `emit` gets the tokens that one event has decided together, and before them those of the prompt that were scored
        together. Cancelling this coroutine cancels the session. All lanes are closed at the end in any case.
        """
        finished: asyncio.Future[events.Finished] = asyncio.get_running_loop().create_future()
        self._emit, self._finished, self._context = emit, finished, contextvars.copy_context()
        try:
            self._began = time.monotonic()
            self._handling = True
            self._carry_out(self._advance(None, time.monotonic()))
            self._handling = False
            self._handle_all()
            return await finished
        except asyncio.CancelledError:
            self._advance(events.Cancelled(), time.monotonic())
            raise
        finally:
            self._ended = time.monotonic()
            self._release()

    def _report(self, event: events.Event, now: float | None = None) -> None:
        """Take an event that happens now; it is handled after those before it."""
        if isinstance(event, events.Lost) and isinstance(event.error, ServiceError) and event.lane in self._lanes:
            self._failures[self._lanes[event.lane].roster.role] = event.error
        self._events.append((event, time.monotonic() if now is None else now))
        self._handle_all()

    def _handle_all(self) -> None:
        """Handle what has happened, unless that is being done or the session is over or not begun."""
        finished = self._finished
        if self._handling or finished is None:
            return
        self._handling = True
        try:
            while self._events and not finished.done():
                self._carry_out(self._handle(*self._events.popleft()))
        except Exception as error:  # a fault in this session is its own: the link goes on with the others
            finished.set_exception(error)
        finally:
            self._handling = False

    def _handle(self, event: events.Event, now: float) -> list[events.Command]:
        """A reply that the session does not allow is a failure of its service, which is not used again."""
        try:
            return self._advance(event, now)
        except events.IllegalEventError as error:
            if not isinstance(event, events.Ready | events.Replied):
                raise
            lane = self._lanes[event.lane]
            failure = Internal(f"the {lane.roster.role} broke the protocol: {error}")
            lane.close(str(failure))
            self._failures[lane.roster.role] = failure
            return self._advance(events.Lost(event.lane, failure), now)

    def _advance(self, event: events.Event | None, now: float) -> list[events.Command]:
        """One call of the state machine, measured and recorded; without an event it is started."""
        commands: list[events.Command] = []
        began = time.perf_counter()
        try:
            commands = self._session.start(now) if event is None else self._session.handle(event, now)
        finally:
            self._latest = time.perf_counter() - began
            self._verification += self._latest
            self._handled += 1
            if self._watches:  # a step that the session refuses or fails at has no commands
                step = Step(now, event, tuple(commands), self._latest, self._session.counts.row_misses)
                for watch in self._watches:
                    watch.record(step)
        return commands

    def _carry_out(self, commands: list[events.Command]) -> None:
        emitted: list[events.Emitted] = []
        finished: events.Finished | None = None
        for command in commands:
            if isinstance(command, events.Emitted):
                emitted.append(command)
            elif isinstance(command, events.Send):
                self._lanes[command.lane].send(command.request)
            elif isinstance(command, events.SetTimer):
                self._set_timer(command)
            elif isinstance(command, events.Open):
                target = isinstance(command.request, OpenTarget)
                roster: Roster[Any] = self._services.targets if target else self._services.drafters
                lane = self._lanes[command.lane] = ServiceLane(command, roster, self._report, self._take, self._context)
                self._measured.append(lane.watch)
            elif isinstance(command, events.Close):
                self._lanes[command.lane].close(command.blame)
            elif isinstance(command, PromptScored):
                self._emit(command)
            else:
                finished = command
        if emitted:
            self._first_token = self._first_token or time.monotonic()
            self._emit(emitted)
        if finished is not None and self._finished is not None:
            self._finished.set_result(finished)

    def _take(self, lane: ServiceLane) -> str:
        """The address where a lane is opened; raises the role's latest ServiceError if none is left."""
        others = [other for other in self._lanes.values() if other is not lane and other.roster is lane.roster]
        used = {other.watch.address for other in others if other.live}
        blamed = {other.watch.address for other in others if other.blamed}
        roster = lane.roster
        address = roster.take(used, blamed, time.monotonic())
        if address is None:
            raise roster.replaced or self._failures.get(roster.role) or Unreachable(roster.lacking)
        return address

    def _set_timer(self, command: events.SetTimer) -> None:
        """Most are replaced long before they expire: one that is to expire later is looked at again then."""
        timer = command.timer
        due, _ = self._due[timer] = asyncio.get_running_loop().time() + command.seconds, command.number
        known = self._timers.get(timer)
        if known is None or known[0] > due:
            if known is not None:
                known[1].cancel()
            self._call_at(due, timer)

    def _call_at(self, due: float, timer: events.Timer) -> None:
        self._timers[timer] = due, asyncio.get_running_loop().call_at(due, self._expired, timer)

    def _expired(self, timer: events.Timer) -> None:
        due, number = self._due[timer]
        called, _ = self._timers.pop(timer)
        if called < due:
            self._call_at(due, timer)
        else:
            self._report(events.Expired(timer, number))

    def _release(self) -> None:
        self._session.abandon()
        for _, timer in self._timers.values():
            timer.cancel()
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()  # each reports to this driver: the two would keep each other for the garbage collector
