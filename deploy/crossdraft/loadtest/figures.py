"""What a server says of one output it has made. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class LaneFigures:
    """What one session of the orchestrator with a service cost, or several of one role together."""

    role: str  # target or drafter
    bytes_sent: int = 0  # serialized
    bytes_received: int = 0
    trip_counts: tuple[int, ...] = ()  # questions by the length of their round trip: `pipeline.trips.BOUNDS`
    trip_seconds: float = 0.0  # of these round trips, without the model's time
    queued_seconds: float = 0.0  # ... in which a question waited for the model, which was busy with others
    model_seconds: float = 0.0  # in the model, for all answers
    codec_seconds: float = 0.0  # in which the orchestrator made messages of values and values of messages
    open_seconds: float = 0.0
    idle_seconds: float = 0.0  # of these, in which nothing was asked of it that it had not answered
    lost: str = ""  # how the service failed

    @property
    def questions(self) -> int:
        """How many round trips there were."""
        return sum(self.trip_counts)


@dataclass(frozen=True)
class Figures:
    """Counts of one output."""

    tokens: int
    passes: int = 0  # of the target
    accepted: int = 0  # tokens as drafted
    corrected: int = 0  # tokens in the place of a refused proposal
    judged_at: tuple[int, ...] = ()  # by place in a round: proposals that were accepted or refused
    accepted_at: tuple[int, ...] = ()  # ... that were accepted
    verification_seconds: float = 0.0  # CPU time of the orchestrator's state machine
    lanes: tuple[LaneFigures, ...] = ()


LANE_FIELDS = frozenset(one.name for one in fields(LaneFigures))
FIELDS = frozenset(one.name for one in fields(Figures))


def figures_of(given: Mapping[str, Any]) -> Figures:
    """From figures by name, as HTTP and gRPC have them; what is not known here is left out.

    Raises:
        ValueError: there is no count of tokens, or a figure is of a wrong kind.
    """
    try:
        kept = {name: _plain(value) for name, value in given.items() if name in FIELDS and name != "lanes"}
        return Figures(**kept, lanes=tuple(_lane(one) for one in given.get("lanes", ())))
    except (TypeError, AttributeError) as error:
        raise ValueError(f"the figures of an output mean nothing: {error}") from error


def _lane(given: Mapping[str, Any]) -> LaneFigures:
    return LaneFigures(**{name: _plain(value) for name, value in given.items() if name in LANE_FIELDS})


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else value
