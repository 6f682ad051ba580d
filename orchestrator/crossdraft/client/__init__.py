"""The pipeline: drafter and target brought together, one session a request."""

from crossdraft.client.api import Generation, Pipeline, connect
from crossdraft.session.events import Reason
from crossdraft.speculation.choice import Choice
from crossdraft.types.messages import SamplingOptions
from crossdraft.types.output import Token
from crossdraft.types.request import Chat, GenerationRequest, Grammar, Message, Overlap, RequestError
from crossdraft.types.statistics import Kind, Statistics

__all__ = [
    "Chat",
    "Choice",
    "Generation",
    "GenerationRequest",
    "Grammar",
    "Kind",
    "Message",
    "Overlap",
    "Pipeline",
    "Reason",
    "RequestError",
    "SamplingOptions",
    "Statistics",
    "Token",
    "connect",
]
