"""API keys and rate limits of clients, for HTTP and gRPC alike.

Only digests of keys are kept, so that neither a log nor a memory dump shows a key. Token buckets by hand: the `limits`
package has windows only, and aiolimiter cannot say how long to wait.
"""

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Self

from crossdraft.config.api import RateOptions
from crossdraft.rpc.errors import KeyRefused

MIN_LENGTH = 16  # characters; shorter keys can be guessed
SCHEME = "bearer"
MAX_CLIENTS = 10_000  # with a bucket; above that the one whose latest request is oldest is dropped
HOW = "send it as `Authorization: Bearer KEY`"


class KeysError(ValueError):
    """The keys themselves cannot be used; the text says what to change."""


@dataclass(frozen=True)
class Keys:
    """API keys, each with the name of its holder. Without any, everybody may use the API."""

    holders: Mapping[bytes, str] = field(default_factory=dict, repr=False)  # by the SHA-256 of the key's UTF-8

    @classmethod
    def of(cls, keys: Mapping[str, str]) -> Self:
        """From keys by the names of their holders. Raises KeysError: a key cannot be used, or two have the same one."""
        holders: dict[bytes, str] = {}
        for name, key in keys.items():
            if len(key) < MIN_LENGTH or not all("!" <= letter <= "~" for letter in key):
                raise KeysError(f"the key of {name!r} must be {MIN_LENGTH} or more visible ASCII characters, no spaces")
            if (other := holders.setdefault(digest(key), name)) != name:
                raise KeysError(f"{name!r} has the same key as {other!r}; give each holder one of its own")
        return cls(holders)

    @classmethod
    def read(cls, path: Path) -> Self:
        """From a file with a line `NAME KEY` for each holder; empty lines and lines that begin with # are skipped.
        Raises KeysError: it cannot be read, or a line has another form; the text names the line, never the key."""
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise KeysError(f"cannot read the API keys in {path}: {error}") from error
        keys: dict[str, str] = {}
        for number, line in enumerate(lines, 1):
            match line.split():
                case [name, key] if not name.startswith("#") and name not in keys:
                    keys[name] = key
                case [name, _] if not name.startswith("#"):
                    raise KeysError(f"{path}, line {number}: {name!r} has a key already; names must differ")
                case [first, *_] if not first.startswith("#"):
                    raise KeysError(f"{path}, line {number}: write a name, a space and the key of it")
        if not keys:
            raise KeysError(f"{path} has no key; write a line with a name, a space and a key, or leave the file out")
        return cls.of(keys)

    @classmethod
    def given(cls, path: Path | None, keys: Sequence[str]) -> Self:
        """Those of a file and others, whose holders get numbers for names; raises KeysError."""
        read = {} if path is None else cls.read(path).holders
        return cls(
            {**cls.of({f"key {number}": key for number, key in enumerate(filter(None, keys), 1)}).holders, **read}
        )

    def holder(self, authorization: str | None) -> str:
        """The holder of the key in a client's HTTP header or gRPC metadata of this name; empty where no key is needed.
        Raises KeyRefused: there is no key, or an unknown one."""
        if not self.holders:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != SCHEME or not key.strip():
            raise KeyRefused(f"an API key is needed: {HOW}")
        shown, found = digest(key.strip()), None
        for known, name in self.holders.items():  # all of them: the time taken must tell nothing about a key
            if hmac.compare_digest(known, shown):
                found = name
        if found is None:
            raise KeyRefused(f"this API key is not known: {HOW}")
        return found


def scope_of(authorization: str | None, salt: str, keys: Keys) -> str:
    """What a client's requests with this salt have in common, as a text that nobody can guess who has not the key."""
    key = (authorization or "").partition(" ")[2].strip() if keys.holders else ""
    return hmac.new(digest(key), salt.encode(), sha256).hexdigest()


def digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True)
class GenerationOptions:
    """Keys and limits of clients."""

    keys: Keys = field(default_factory=Keys)  # none: everybody may use it
    rates: RateOptions = field(default_factory=RateOptions)


class Rates:
    """A token bucket for each client: for each holder of a key, or each address where no key is needed. It holds
    `burst` requests and is refilled at `rate` a minute. Pure: the caller tells the time."""

    def __init__(self, options: RateOptions) -> None:
        self._burst, self._per_second = options.burst, (options.rate or 0.0) / 60
        # By client, in the order of their latest requests: what is left, and the time of the latest, in seconds.
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, client: str, now: float) -> float:
        """Takes one request from a client's bucket at the time `now`, in seconds. Returns 0 if the bucket had one, or
        there is no limit, else the seconds until it will."""
        if not self._per_second:
            return 0.0
        left, at = self._buckets.pop(client, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._per_second)
        self._buckets[client] = (left - 1 if left >= 1 else left, now)
        while len(self._buckets) > MAX_CLIENTS:  # a dropped client gets a full bucket, so hardly exceeds its limit
            del self._buckets[next(iter(self._buckets))]
        return 0.0 if left >= 1 else (1 - left) / self._per_second
