"""OpenAI's HTTP API in front of a `Backend`."""

from crossdraft.serving.http.app import make_app
from crossdraft.serving.http.middleware import HttpOptions

__all__ = ["HttpOptions", "make_app"]
