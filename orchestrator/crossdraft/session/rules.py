"""The rules of a session: its states, and what may happen in each. Read this first.

Theory
======

A session brings one request from its prompt to the last token of its output. It talks to services over *lanes*: one
lane is one opened session with one target or one drafter, and every opening has a number of its own. Messages of
different lanes come in any order. A pass returns when the draft that it was for is refused; draft tokens arrive for an
epoch that is over; any service may be lost between any two messages. What to do in each order cannot be written down,
so it is not. Instead there are small state machines that know nothing of each other:

    the session        NEW ---> OPENING ---> RUNNING ---> DONE
    a target's lane    OPENING ---> IDLE <---> SCORING,  IDLE <---> PASSING
    a drafter's lane   OPENING ---> IDLE <---> DRAFTING <---> SCORING

`TRANSITIONS` is the table of the lanes: which messages may be sent and may come in each state, and which state follows.
Nothing stores a lane's state. It is read off what the service owes there, so the two cannot differ: a target in PASSING
owes the answers of a pass, a drafter in DRAFTING what is due of the running epoch. The session itself is OPENING until
it can begin (a target is there, and has scored the prompt if it must), and DONE when it has said `Finished`.

Four rules make this enough.

1. **A reply is legal if it was asked for.** The table says which kinds may come. Whether it is the very one that is
   due, only who asked can tell (`expects`): a target answers the pass under way, with one row or draw for each node
   that it was asked for, then rows that agree with the heads sent before; and the prompt's tokens in order. A drafter
   sends the draft tokens of the running epoch in order, and scores if it was asked for some.

2. **What is over is ignored.** Replies of a lane that was closed or lost, or of an epoch or a pass that another has
   followed, were sent before the service could know; a timer that was set anew may still go off. Neither is anybody's
   fault.

3. **An illegal event changes nothing.** All checks come before the first change. So the driver can drop the service
   that broke the rules, tell the session that it is lost, and go on. What a drafter was asked for and sent, but nobody
   can use (an id out of range, a row that cannot give its token), is legal and costs the drafter its lane: it is not
   trusted. What a target sends is, as the output is drawn from it.

4. **Events only add to what is known.** What is done about it does not depend on which event it was: after every legal
   one the walk goes on with what is at hand, a free target gets a pass if the walk lacks a row, and the drafter is
   asked for more (`Session.handle`). So the order of events may change what an output costs and, where it draws from
   rows, which of the equally right outputs it is. It does not change their distribution, because nothing that decides
   a token looks at a draft token before the walk has asked for it (`verification.walk`).

The session waits for three things only, each with a deadline: for draft tokens while the target stands idle
(`Timer.STALL`), for what the drafter owes (`Timer.DRAFTER`), and for a target (`Timer.TARGET`). What a target owes, the
link to it watches.
"""

from enum import Enum
from typing import Any

from crossdraft.session.events import Cancelled, Event, Expired, IllegalEventError, Ready, Replied, Reply, Request
from crossdraft.types import messages


class State(Enum):
    """The states of a session."""

    NEW = "new"
    OPENING = "waits for its services to open"
    RUNNING = "under way"
    DONE = "over"


class TargetState(Enum):
    """The states of a lane to a target."""

    __hash__ = object.__hash__  # as fast as looking up at every reply asks for
    OPENING = "is being opened"
    IDLE = "owes no pass"
    SCORING = "scores the prompt"
    PASSING = "makes a pass, or a run of them"


class DrafterState(Enum):
    """The states of a lane to a drafter."""

    __hash__ = object.__hash__
    OPENING = "is being opened"
    IDLE = "knows of no running epoch"
    DRAFTING = "drafts the running epoch, or has drafted all that was asked for"
    SCORING = "owes scores of the running epoch's draft"


LaneState = TargetState | DrafterState
_T, _D = TargetState, DrafterState

# What may be sent (the upper lines) and may come (the lower ones) in each state, and the states that may follow. Of two
# the second follows what is the last of its kind: a reply without `more`, an `Advance` to no draft token. If a drafter
# has sent all that was asked for when an epoch ends, it becomes idle without a message.
TRANSITIONS: dict[LaneState, dict[type[Ready | Request | Reply], tuple[LaneState, ...]]] = {
    _T.OPENING: {
        Ready: (_T.IDLE,),
    },
    _T.IDLE: {
        messages.ScorePrompt: (_T.SCORING,), messages.Pass: (_T.PASSING,), messages.FetchRow: (_T.IDLE,),
        messages.RowFetched: (_T.IDLE,),
    },
    _T.SCORING: {
        messages.PromptScored: (_T.SCORING, _T.IDLE),
    },
    _T.PASSING: {
        messages.FetchRow: (_T.PASSING,), messages.RunTo: (_T.PASSING,),
        messages.PassDone: (_T.PASSING, _T.IDLE),
    },
    _D.OPENING: {
        Ready: (_D.IDLE,),
    },
    _D.IDLE: {
        messages.Draft: (_D.DRAFTING,),
    },
    _D.DRAFTING: {
        messages.Draft: (_D.DRAFTING,), messages.Advance: (_D.DRAFTING, _D.IDLE), messages.Score: (_D.SCORING,),
        messages.Drafted: (_D.DRAFTING,),
    },
    _D.SCORING: {
        messages.Drafted: (_D.SCORING,), messages.Scored: (_D.DRAFTING,),
    },
}  # fmt: skip


def admits(event: Event, state: State, lane: Any) -> bool:
    """Whether an event is to be taken; False: it is outdated.

    `event`: what happened. `state`: of the session. `lane`: where it happened; None: on none, or on one that is over.
    Raises IllegalEventError: it breaks a rule.
    """
    if state is State.NEW:
        raise IllegalEventError("the session has not begun")
    if state is State.DONE:
        return False
    if isinstance(event, Replied):
        reply = event.reply
        if lane is None or lane.outdated(reply):
            return False
        legal = TRANSITIONS[lane.state]
        if type(reply) not in legal or not lane.expects(reply):
            named = ", ".join(f"{name} {value}" for name, value in vars(reply).items() if type(value) is int)
            said = f"{type(reply).__name__} ({named})" if named else type(reply).__name__
            why = "from a lane that is not open" if Ready in legal else "was not asked for"
            raise IllegalEventError(f"{said} {why}")
        return True
    if isinstance(event, Expired | Cancelled):
        return True
    if lane is not None and isinstance(event, Ready) and Ready not in TRANSITIONS[lane.state]:
        raise IllegalEventError("the lane is open already")
    return lane is not None
