"""Token buckets: how many requests each client may make. Pure: told the time."""

from dataclasses import dataclass

MOST_CLIENTS = 10_000  # whose buckets are kept; beyond that the one that asked longest ago is forgotten


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


@dataclass
class _Bucket:
    left: float  # requests
    at: float  # seconds


class Rates:
    """The buckets of all clients."""

    def __init__(self, limit: RateLimit) -> None:
        self._limit = limit
        self._per_second = limit.per_minute / 60
        self._buckets: dict[str, _Bucket] = {}  # by client, the one that asked longest ago first

    def take(self, client: str, now: float) -> float:
        """One request of this client.

        Returns:
            0 if it may be made, else the seconds until one may.
        """
        bucket = self._buckets.pop(client, None) or _Bucket(self._limit.burst, now)
        bucket.left = min(self._limit.burst, bucket.left + (now - bucket.at) * self._per_second)
        bucket.at = now
        self._buckets[client] = bucket
        self._forget()
        if bucket.left < 1:
            return (1 - bucket.left) / self._per_second
        bucket.left -= 1
        return 0.0

    def _forget(self) -> None:
        """Whoever asked longest ago; a client with a new bucket may ask no faster than the limit for long."""
        while len(self._buckets) > MOST_CLIENTS:
            del self._buckets[next(iter(self._buckets))]
