"""What the controllers of a pipeline's generations have learnt, for the next ones to begin with.

Of the outputs of one kind that are under way one leads: it gets to know the drafter, and tries again one that was put
aside. The others begin with what is known, or decode plainly until they are told; they would all try the same, each at
a price. When the leading output is over another one leads. One that was made and has not begun leads nobody.
"""

from dataclasses import dataclass, field
from typing import Protocol
from weakref import ReferenceType, ref

from crossdraft.speculation.choice import Choice, Controller, Estimates, Explained, Fixed, Told, lock_step
from crossdraft.speculation.controller import Adaptive, Limits
from crossdraft.types.messages import MOST_DRAFT_TOKENS
from crossdraft.types.request import GenerationRequest, Overlap
from crossdraft.verification.methods import Method

KINDS = 32  # of requests that are kept apart; the one that was not asked for longest is forgotten
Kind = tuple[str | None, float, float | None]  # acceptance depends on the method and on both temperatures


class Listener(Protocol):
    """A generation."""

    def tell(self, told: Told) -> None:
        """What another one has learnt of the same services."""
        ...


@dataclass(eq=False)
class Known:
    """Of one kind of request."""

    latest: Adaptive  # the controller that was made last, or one that knew more
    under_way: "list[ReferenceType[Member]]" = field(default_factory=list)  # in the order of their making

    @property
    def estimates(self) -> Estimates:
        """What is believed: by the latest, or where that has only heard of the drafter, by one that leads."""
        latest = self.latest.estimates
        leading = () if latest.known else (one.estimates for one in self.members() if one.leads and one.begun)
        return next(iter(leading), latest)

    def members(self) -> "list[Member]":
        """The outputs that are under way."""
        found = [member for one in self.under_way if (member := one()) is not None]
        self.under_way = [ref(member) for member in found]
        return found


class Experience:
    """The latest controller of each kind of request, and who learns for whom."""

    def __init__(self) -> None:
        self._known: dict[Kind, Known] = {}

    def of(self, request: GenerationRequest) -> Estimates | None:
        """What is believed now of services for such requests; None if nothing was learnt."""
        known = self._known.get(_kind(request))
        return None if known is None else known.estimates

    def led(self, request: GenerationRequest) -> bool:
        """Whether an output of this kind is under way, so that another one follows it."""
        known = self._known.get(_kind(request))
        return known is not None and bool(known.members())

    def keep(self, request: GenerationRequest, controller: Controller) -> "Member | None":
        """Its beliefs count from now on, if it is one that learns.

        Returns:
            Its output's place among those of this kind, for as long as somebody keeps it.
        """
        learning = controller.controller if isinstance(controller, Explained) else controller
        if not isinstance(learning, Adaptive):
            return None
        known = self._known.pop(_kind(request), None) or Known(learning)
        known.latest = learning
        self._known[_kind(request)] = known
        if len(self._known) > KINDS:
            del self._known[next(iter(self._known))]
        member = Member(known, learning)
        known.under_way.append(ref(member))
        return member


class Member:
    """An output that is under way. It looks after each step what its controller has learnt."""

    def __init__(self, known: Known, controller: Adaptive) -> None:
        self.leads = not controller.follows
        self.begun = False
        self._known = known
        self._controller = controller
        self._listener: ReferenceType[Listener] | None = None
        self._told: bool | None = None  # whether drafts pay, as the others were told last; None: not yet

    @property
    def estimates(self) -> Estimates:
        """What its controller believes."""
        return self._controller.estimates

    def attach(self, listener: Listener) -> None:
        """This is the output."""
        self._listener = ref(listener)

    def begin(self) -> None:
        """Somebody wants its tokens: from now on it leads, unless another one does that has begun."""
        self.begun = True
        if not any(other.leads and other.begun for other in self._known.members()):
            self._lead(Estimates())

    def look(self) -> None:
        """If it leads and has learnt what others can use, they are told."""
        controller = self._controller
        if not controller.follows and controller.knows and controller.drafts != self._told:
            self._told = controller.drafts
            told = Told(controller.estimates)
            for other in self._known.members():
                if other is not self:
                    other.tell(told)

    def close(self) -> None:
        """It is over; another one leads, and what it knows is kept."""
        others = [other for other in self._known.members() if other is not self]
        self._known.under_way = [ref(other) for other in others]
        estimates = self.estimates
        if estimates.known and not self._known.latest.estimates.known:
            self._known.latest = self._controller
        begun = [other for other in others if other.begun]
        if begun and not any(other.leads for other in begun):
            begun[0]._lead(estimates)

    def _lead(self, estimates: Estimates) -> None:
        """From now on it tries what is not known, if it does not yet."""
        if not self.leads:
            self.leads = True
            self.tell(Told(estimates, leads=True))

    def tell(self, told: Told) -> None:
        """Passes it on to the output."""
        listener = None if self._listener is None else self._listener()
        if listener is not None:
            listener.tell(told)


def _kind(request: GenerationRequest) -> Kind:
    return request.method, request.options.temperature, request.drafter_temperature


# Who decides how the epochs of a request are run.


def controller_of(
    request: GenerationRequest, method: Method, targets: int, before: Estimates | None, follows: bool = False
) -> Controller:
    """Who decides how each epoch is run."""
    match request.overlap:
        case Overlap.OFF:
            return lock_step(request.k)
        case Overlap.ON:
            return Fixed(_always_overlapped(request))
    limits = Limits(
        rounds_only=method.whole_draft,
        samples=method.samples,
        window=most_draft_tokens(request),
        wait=request.wait,
        branch_depth=request.branches,
        branch_width=request.branch_width,
        targets=targets,
    )
    return Adaptive(before, limits, follows)


def most_draft_tokens(request: GenerationRequest) -> int:
    """Beyond those revealed."""
    if request.window is not None:
        return request.window
    usual = {Overlap.OFF: request.k, Overlap.ON: 2 * request.k, Overlap.AUTO: Limits().window}[request.overlap]
    return min(MOST_DRAFT_TOKENS, max(usual, request.wait or 0))


def _always_overlapped(request: GenerationRequest) -> Choice:
    """A pass is sent with k draft tokens if they come in time, and as many again are drafted meanwhile, in two replies.

    With a window or a wait of the request's own each of them is a reply: the drafter may be slow beside a pass.
    """
    window = most_draft_tokens(request)
    wait = min(request.k, window) if request.wait is None else request.wait
    usual = request.window is None and request.wait is None
    return Choice(
        window=window,
        wait=wait,
        chunk=(wait + 1) // 2 if usual else 1,
        branch_depth=request.branches or 0,
        branch_width=request.branch_width or 1,
        speculate=request.speculation,
        reason="overlapped, as asked for",
    )
