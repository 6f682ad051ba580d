"""OpenAI's HTTP API before `Outputs`."""

from crossdraft.serving.http.app import make_app
from crossdraft.serving.http.options import HttpOptions
from crossdraft.serving.rates import RateLimit

__all__ = ["HttpOptions", "RateLimit", "make_app"]
