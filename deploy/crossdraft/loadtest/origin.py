"""The URL of a server. Pure."""

from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Origin:
    """Where an HTTP server is, and where its API begins."""

    host: str
    port: int
    encrypted: bool
    root: str  # path before /v1

    @property
    def name(self) -> str:
        """As the header Host has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @staticmethod
    def parsed(url: str) -> "Origin":
        """From http://HOST:PORT or https://, perhaps with a path; `/v1` at its end may be there or not.

        Raises:
            ValueError: this is no such URL.
        """
        complaint = f"--url must be such as http://127.0.0.1:8000, got {url}"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(complaint) from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(complaint)
        encrypted = parts.scheme == "https"
        root = parts.path.rstrip("/").removesuffix("/v1")
        return Origin(parts.hostname, port or (443 if encrypted else 80), encrypted, root)
