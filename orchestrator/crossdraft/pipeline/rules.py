"""Which event is legal in which state of a session."""

from enum import Enum

from crossdraft.pipeline.events import (
    Cancelled,
    DrafterLost,
    DrafterOpened,
    Expired,
    TargetLost,
    TargetOpened,
)
from crossdraft.verification.exchange import Drafted, PassDone, RowFetched, Scored


class IllegalEventError(Exception):
    """An event that the session's state does not allow. The session is unchanged."""


class State(Enum):
    """What the session waits for."""

    NEW = "start"
    OPENING = "open sessions"
    DRAFTING = "proposals"
    PASSING = "a pass"
    FETCHING = "a whole row"
    SCORING = "scores of prefixes"
    DONE = "nothing"


ALLOWED: dict[State, tuple[type, ...]] = {
    State.NEW: (),
    State.OPENING: (TargetOpened, DrafterOpened, DrafterLost, TargetLost, Cancelled),
    State.DRAFTING: (Drafted, Expired, DrafterLost, TargetLost, Cancelled),
    State.PASSING: (PassDone, DrafterLost, TargetLost, Cancelled),
    State.FETCHING: (RowFetched, DrafterLost, TargetLost, Cancelled),
    State.SCORING: (Scored, Expired, DrafterLost, TargetLost, Cancelled),
    State.DONE: (),
}
