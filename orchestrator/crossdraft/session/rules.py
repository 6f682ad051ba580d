"""Which event is legal when: the rules of a session's state machine, all of them.

What a lane says after it was lost or closed, and what belongs to an epoch or a timer that is over, is outdated: it
changes nothing. Everything else that breaks a rule here is illegal.
"""

from enum import Enum

from crossdraft.session.draft_side import Drafting
from crossdraft.session.events import Event, Expired, Lane, Lost, Ready, Replied
from crossdraft.session.target_side import Targets
from crossdraft.types.messages import Drafted, PassDone, RowFetched, Scored


class State(Enum):
    """How far the session is."""

    NEW = "new"
    OPENING = "waits for its services to open"
    RUNNING = "under way"
    DONE = "over"


def outdated(event: Event, state: State, targets: Targets, drafting: Drafting) -> bool:
    """Whether it belongs to a session, a lane or an epoch that is over."""
    if state in (State.NEW, State.DONE):
        return state is State.DONE
    match event:
        case Ready(lane) | Lost(lane) | Replied(lane):
            if lane not in targets.lanes and lane != drafting.lane:
                return True
    match event:
        case Replied(lane, RowFetched() as reply) if lane in targets.lanes:
            latest = targets.lanes[lane].latest
            return latest is not None and reply.number < latest.sent.number
        case Replied(_, Drafted() | Scored() as reply):
            return reply.epoch < drafting.epoch or (reply.epoch == drafting.epoch and not drafting.asked)
    return False


def fault_of(event: Event, state: State, targets: Targets, drafting: Drafting) -> str:
    """Why an event is illegal now; empty if it is not.

    - Nothing before the session has begun.
    - A lane opens once, and answers only then.
    - Targets send passes and rows, drafters draft tokens and scores.
    - A target answers what it was asked: the pass under way with one row (or sample) for each node, then rows.
    - A drafter sends the draft tokens of the running epoch in order, and scores when it was asked.
    """
    if state is State.NEW:
        return "the session has not begun"
    match event:
        case Ready(lane):
            return "the lane is open already" if _open(lane, targets, drafting) else ""
        case Replied(lane, reply) if not _open(lane, targets, drafting):
            return f"{type(reply).__name__} from a lane that is not open"
        case Replied(lane, PassDone() | RowFetched() as reply):
            due = lane in targets.lanes and targets.expects(lane, reply)
            return "" if due else _unexpected(reply)
        case Replied(lane, Drafted() | Scored() as reply):
            return "" if lane == drafting.lane and drafting.expects(reply) else _unexpected(reply)
        case Expired() | Lost():
            return ""
    return ""


def _open(lane: Lane, targets: Targets, drafting: Drafting) -> bool:
    return targets.lanes[lane].ready if lane in targets.lanes else drafting.ready


def _unexpected(reply: Drafted | Scored | PassDone | RowFetched) -> str:
    match reply:
        case PassDone():
            return f"pass {reply.number} with {len(reply.nodes)} answers was not asked for"
        case RowFetched():
            return f"row {reply.node} of pass {reply.number} was not asked for"
        case Drafted():
            return f"draft tokens of epoch {reply.epoch} from place {reply.first} on were not due"
    return f"scores of epoch {reply.epoch} were not asked for"
