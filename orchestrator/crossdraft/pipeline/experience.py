"""What the governors of a pipeline's generations have learnt, for the next ones to begin with.

Of outputs that begin together, before anything is known of the services, the first gets to know the drafter, and the
others decode plainly until it tells them what it has learnt: they would all try the same at the same time.
"""

from dataclasses import dataclass, field
from typing import Protocol
from weakref import ReferenceType, WeakSet, ref

from crossdraft.pipeline.estimates import Estimates
from crossdraft.pipeline.explanation import Explained
from crossdraft.pipeline.governing import Governor, Told
from crossdraft.pipeline.governor import Adaptive
from crossdraft.pipeline.recording import Step
from crossdraft.pipeline.request import GenerationRequest

KINDS = 32  # of requests that are kept apart; the one that was not asked for longest is forgotten

Kind = tuple[str | None, float, float | None]  # acceptance depends on the method and on both temperatures


class Listener(Protocol):
    """A generation."""

    def tell(self, told: Told) -> None:
        """Another one has learnt something of the same services."""
        ...


@dataclass(eq=False)
class Known:
    """Of one kind of request."""

    latest: Adaptive  # the governor that began last
    leads: "ReferenceType[News] | None" = None  # of the output that gets to know the services for others
    follow: WeakSet[Listener] = field(default_factory=WeakSet)


class Experience:
    """The latest governor of each kind of request, and who learns for whom."""

    def __init__(self) -> None:
        self._known: dict[Kind, Known] = {}

    def of(self, request: GenerationRequest) -> Estimates | None:
        """What is believed now of services for such requests; None if nothing was learnt."""
        known = self._known.get(_kind(request))
        return None if known is None else known.latest.estimates

    def led(self, request: GenerationRequest) -> bool:
        """Whether an output of this kind is getting to know the services, so that another one is to wait for it."""
        known = self._known.get(_kind(request))
        return known is not None and known.leads is not None and known.leads() is not None

    def keep(self, request: GenerationRequest, governor: Governor) -> None:
        """Its beliefs count from now on, if it is one that learns."""
        learning = governor.governor if isinstance(governor, Explained) else governor
        if isinstance(learning, Adaptive):
            known = self._known.pop(_kind(request), None) or Known(learning)
            known.latest = learning
            self._known[_kind(request)] = known
            if len(self._known) > KINDS:
                del self._known[next(iter(self._known))]

    def news(self, request: GenerationRequest) -> "News | None":
        """What is to watch the output whose governor was kept just now, if it is the one to get to know the services.
        It leads for as long as this is alive."""
        known = self._known.get(_kind(request))
        if known is None or known.latest.estimates.known or self.led(request):
            return None
        news = News(known, known.latest)
        known.leads = ref(news)
        return news

    def follow(self, request: GenerationRequest, generation: Listener) -> None:
        """A generation that waits for what the leading one learns."""
        self._known[_kind(request)].follow.add(generation)


class News:
    """Watches the output that leads: when it knows enough, or is over, the others are told. A `Recorder`."""

    def __init__(self, known: Known, governor: Adaptive) -> None:
        self._known = known
        self._governor = governor
        self._told = False

    def record(self, step: Step) -> None:
        """After each step."""
        if not self._told and self._governor.knows:
            self._tell(self._governor.estimates)

    def close(self) -> None:
        """It is over."""
        if not self._told:
            self._tell(None)

    def _tell(self, estimates: Estimates | None) -> None:
        self._told = True
        self._known.leads = None
        for one in list(self._known.follow):
            one.tell(Told(estimates))
        self._known.follow.clear()


def _kind(request: GenerationRequest) -> Kind:
    return request.method, request.options.temperature, request.drafter_temperature
