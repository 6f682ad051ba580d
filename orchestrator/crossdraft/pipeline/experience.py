"""What the governors of a pipeline's generations have learnt, for the next ones to begin with."""

from crossdraft.pipeline.estimates import Estimates
from crossdraft.pipeline.explanation import Explained
from crossdraft.pipeline.governing import Governor
from crossdraft.pipeline.governor import Adaptive
from crossdraft.pipeline.request import GenerationRequest

KINDS = 32  # of requests that are kept apart; the one that was not asked for longest is forgotten

Kind = tuple[str | None, float, float | None]  # acceptance depends on the method and on both temperatures


class Experience:
    """The latest governor of each kind of request."""

    def __init__(self) -> None:
        self._governors: dict[Kind, Adaptive] = {}

    def of(self, request: GenerationRequest) -> Estimates | None:
        """What is believed now of services for such requests; None if nothing was learnt."""
        governor = self._governors.get(_kind(request))
        return None if governor is None else governor.estimates

    def keep(self, request: GenerationRequest, governor: Governor) -> None:
        """Its beliefs count from now on, if it is one that learns."""
        learning = governor.governor if isinstance(governor, Explained) else governor
        if isinstance(learning, Adaptive):
            self._governors.pop(_kind(request), None)
            self._governors[_kind(request)] = learning
            if len(self._governors) > KINDS:
                del self._governors[next(iter(self._governors))]


def _kind(request: GenerationRequest) -> Kind:
    return request.method, request.options.temperature, request.drafter_temperature
