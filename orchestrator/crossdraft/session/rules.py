"""The rules of the session's state machine: which event is legal in which state.

Replies of a lane after it was lost or closed, and events of an epoch or a timer that is over, are outdated: they change
nothing. Every other event that breaks a rule is illegal.
"""

from enum import Enum

from crossdraft.session.drafter_side import DrafterSide
from crossdraft.session.events import Event, Lost, Ready, Replied, Reply
from crossdraft.session.target_side import TargetSide
from crossdraft.types.messages import Drafted, PassDone, RowFetched, Scored


class State(Enum):
    """The phases of a session."""

    NEW = "new"
    OPENING = "waits for its services to open"
    RUNNING = "under way"
    DONE = "over"


def outdated(event: Event, state: State, target: TargetSide, drafter: DrafterSide) -> bool:
    """Whether the event belongs to a session, a lane or an epoch that is over."""
    if state in (State.NEW, State.DONE):
        return state is State.DONE
    match event:
        case Ready(lane) | Lost(lane) | Replied(lane):
            if lane not in target.lanes and lane != drafter.lane:
                return True
    match event:
        case Replied(lane, RowFetched() as reply) if lane in target.lanes:
            latest = target.lanes[lane].latest
            return latest is not None and reply.number < latest.sent.number
        case Replied(_, Drafted() | Scored() as reply):
            return reply.epoch < drafter.epoch or (reply.epoch == drafter.epoch and not drafter.asked)
    return False


def fault_of(event: Event, state: State, target: TargetSide, drafter: DrafterSide) -> str:
    """Why an event that is not outdated is illegal; empty if it is legal.

    - Nothing happens before the session has begun.
    - A lane opens once, and answers only then.
    - Targets send passes and rows, drafters send draft tokens and scores.
    - A target answers what it was asked: the pass under way with one row (or sample) for each node, then rows that
      agree with the heads sent before.
    - A drafter sends the draft tokens of the running epoch in order, and scores when it was asked.
    """
    if state is State.NEW:
        return "the session has not begun"
    match event:
        case Ready(lane):
            return "the lane is open already" if _open(lane, target, drafter) else ""
        case Replied(lane, reply) if not _open(lane, target, drafter):
            return f"{type(reply).__name__} from a lane that is not open"
        case Replied(lane, PassDone() | RowFetched() as reply):
            if lane not in target.lanes or not target.expects(lane, reply):
                return _unexpected(reply)
            if isinstance(reply, RowFetched) and not target.same_distribution(lane, reply):
                return f"the row of node {reply.node} is not that of the head sent before"
        case Replied(lane, Drafted() | Scored() as reply):
            return "" if lane == drafter.lane and drafter.expects(reply) else _unexpected(reply)
    return ""


def _open(lane: int, target: TargetSide, drafter: DrafterSide) -> bool:
    return target.lanes[lane].ready if lane in target.lanes else drafter.ready


def _unexpected(reply: Reply) -> str:
    match reply:
        case PassDone():
            return f"pass {reply.number} with {len(reply.nodes)} answers was not asked for"
        case RowFetched():
            return f"row {reply.node} of pass {reply.number} was not asked for"
        case Drafted():
            return f"draft tokens of epoch {reply.epoch} from place {reply.first} on were not due"
    return f"scores of epoch {reply.epoch} were not asked for"
