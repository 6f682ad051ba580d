"""OpenAI's HTTP API in front of a `Backend`."""

from crossdraft.serving.http.app import make_app
from crossdraft.serving.http.middleware import HttpOptions
from crossdraft.serving.limits import RateLimit

__all__ = ["HttpOptions", "RateLimit", "make_app"]
