"""What the HTTP front is told when it is made."""

from collections.abc import Callable
from dataclasses import dataclass, field

from crossdraft.serving.keys import Keys


@dataclass(frozen=True)
class RateLimit:
    """A bucket for each client: it holds `burst` requests, and fills again at `per_minute`.

    Raises:
        ValueError: a value is not above 0.
    """

    per_minute: float
    burst: int

    def __post_init__(self) -> None:
        if not (0 < self.per_minute < float("inf") and self.burst >= 1):
            raise ValueError(
                f"a rate limit needs requests a minute above 0 and a burst of at least 1, "
                f"got {self.per_minute} and {self.burst}"
            )


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
