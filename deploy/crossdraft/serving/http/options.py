"""What the HTTP front is told when it is made."""

from collections.abc import Callable
from dataclasses import dataclass, field

from crossdraft.serving.keys import Keys
from crossdraft.serving.rates import RateLimit


@dataclass(frozen=True)
class HttpOptions:
    """Keys, limits, and metrics.

    Raises:
        ValueError: a value is out of its range.
    """

    keys: Keys = field(default_factory=Keys)  # of /v1; none: everybody may use it
    rate: RateLimit | None = None  # of /v1, for each holder of a key, or each address where no key is needed
    most_bytes: int = 4 * 2**20  # of a request's body
    most_choices: int = 32  # outputs that one request may ask for
    stalled_seconds: float = 60.0  # after which a client that does not read is given up
    metrics: Callable[[str], tuple[bytes, str]] | None = None  # of /metrics: from what is accepted to text and its type
    page: bool = True  # the page, at /

    def __post_init__(self) -> None:
        for name in ("most_bytes", "most_choices", "stalled_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
