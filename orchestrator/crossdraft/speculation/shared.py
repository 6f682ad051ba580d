"""Estimates that the generations of a pipeline share.

Of the concurrent outputs of one kind of request one leads: it explores the drafter, and tries again one that was given
up. The others begin with the known estimates, or decode plainly until they are told some, since each exploring by
itself would pay the same price. When the leading output is over, another one that has begun leads.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import ReferenceType, WeakMethod, ref

from crossdraft.speculation.choice import Choice, Controller, Estimates, Explained, Fixed, Told, lock_step
from crossdraft.speculation.controller import Adaptive, Limits
from crossdraft.types.messages import MOST_DRAFT_TOKENS
from crossdraft.types.request import GenerationRequest, Overlap
from crossdraft.verification.walk import Method

KINDS = 32  # of requests that are kept apart; the one that was not asked for longest is forgotten
Kind = tuple[str | None, float, float | None]  # acceptance depends on the method and on both temperatures
Tell = Callable[[Told], None]


@dataclass(eq=False)
class Known:
    """What is known for one kind of request."""

    latest: Adaptive  # the controller created last, or one that knew more
    under_way: "list[ReferenceType[Member]]" = field(default_factory=list)  # in the order of their making

    @property
    def estimates(self) -> Estimates:
        """Those of the latest controller or, if it has not observed both services, of one that leads."""
        latest = self.latest.estimates
        leading = () if latest.known else (one.estimates for one in self.members() if one.leads and one.begun)
        return next(iter(leading), latest)

    def members(self) -> "list[Member]":
        """The outputs that are under way."""
        found = [member for one in self.under_way if (member := one()) is not None]
        self.under_way = [ref(member) for member in found]
        return found


class SharedEstimates:
    """The latest controller of each kind of request, and the outputs under way."""

    def __init__(self) -> None:
        self._known: dict[Kind, Known] = {}

    def of(self, request: GenerationRequest) -> Estimates | None:
        """The estimates for such requests; None if there are none."""
        known = self._known.get(_kind(request))
        return None if known is None else known.estimates

    def led(self, request: GenerationRequest) -> bool:
        """Whether an output of this kind is under way, so that a new one follows it."""
        known = self._known.get(_kind(request))
        return known is not None and bool(known.members())

    def keep(self, request: GenerationRequest, controller: Controller) -> "Member | None":
        """Share the estimates of a new output's controller, if it learns.

        Returns:
            The output's membership, which lasts as long as the caller keeps it; None if the controller does not learn.
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
    """An output that shares estimates with others of its kind."""

    def __init__(self, known: Known, controller: Adaptive) -> None:
        self.leads = not controller.follows
        self.begun = False
        self._known = known
        self._controller = controller
        self._listener: WeakMethod[Tell] | None = None
        self._told: bool | None = None  # whether drafts pay, as the others were told last; None: not yet

    @property
    def estimates(self) -> Estimates:
        """Those of its controller."""
        return self._controller.estimates

    def attach(self, tell: Tell) -> None:
        """Pass estimates of others to this method of the output, which is referred to weakly."""
        self._listener = WeakMethod(tell)

    def begin(self) -> None:
        """The output begins: it leads from now on, unless another one that has begun does."""
        self.begun = True
        if not any(other.leads and other.begun for other in self._known.members()):
            self._lead(Estimates())

    def look(self) -> None:
        """After each step: if it leads and its estimates are news to the others, tell them."""
        controller = self._controller
        if not controller.follows and controller.knows and controller.drafts != self._told:
            self._told = controller.drafts
            told = Told(controller.estimates)
            for other in self._known.members():
                if other is not self:
                    other.tell(told)

    def close(self) -> None:
        """The output is over: keep its estimates, and let another one lead."""
        others = [other for other in self._known.members() if other is not self]
        self._known.under_way = [ref(other) for other in others]
        estimates = self.estimates
        if estimates.known and not self._known.latest.estimates.known:
            self._known.latest = self._controller
        begun = [other for other in others if other.begun]
        if begun and not any(other.leads for other in begun):
            begun[0]._lead(estimates)

    def _lead(self, estimates: Estimates) -> None:
        """Lead from now on, if it does not yet."""
        if not self.leads:
            self.leads = True
            self.tell(Told(estimates, leads=True))

    def tell(self, told: Told) -> None:
        """Pass estimates of another output on to this one."""
        tell = None if self._listener is None else self._listener()
        if tell is not None:
            tell(told)


def _kind(request: GenerationRequest) -> Kind:
    return request.method, request.options.temperature, request.drafter_temperature


def controller_of(
    request: GenerationRequest, method: Method, targets: int, before: Estimates | None, follows: bool = False
) -> Controller:
    """The controller that a request asks for.

    Args:
        targets: lanes to targets.
        before: estimates to begin with.
        follows: another output explores the services.
    """
    match request.overlap:
        case Overlap.OFF:
            return lock_step(request.num_speculative_tokens)
        case Overlap.ON:
            return Fixed(_always_overlapped(request))
    limits = Limits(
        rounds_only=method.whole_draft,
        samples=method.samples,
        max_draft_tokens=most_draft_tokens(request),
        min_draft_tokens=request.min_draft_tokens,
        branch_depth=request.branches,
        branch_width=request.branch_width,
        targets=targets,
    )
    return Adaptive(before, limits, follows)


def most_draft_tokens(request: GenerationRequest) -> int:
    """Most draft tokens beyond those revealed (`Choice.max_draft_tokens`)."""
    if request.max_draft_tokens is not None:
        return request.max_draft_tokens
    in_round = request.num_speculative_tokens
    usual = {Overlap.OFF: in_round, Overlap.ON: 2 * in_round, Overlap.AUTO: Limits().max_draft_tokens}[request.overlap]
    return min(MOST_DRAFT_TOKENS, max(usual, request.min_draft_tokens or 0))


def _always_overlapped(request: GenerationRequest) -> Choice:
    """A pass waits for num_speculative_tokens draft tokens, and as many again are drafted meanwhile, in two replies.

    If the request sets one of max_draft_tokens and min_draft_tokens, each draft token is a reply: the drafter may be
    slow beside a pass.
    """
    window = most_draft_tokens(request)
    wait = min(request.num_speculative_tokens, window) if request.min_draft_tokens is None else request.min_draft_tokens
    usual = request.max_draft_tokens is None and request.min_draft_tokens is None
    return Choice(
        max_draft_tokens=window,
        min_draft_tokens=wait,
        chunk=(wait + 1) // 2 if usual else 1,
        branch_depth=request.branches or 0,
        branch_width=request.branch_width or 1,
        speculate=request.speculation,
        reason="overlapped, as asked for",
    )
