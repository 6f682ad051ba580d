"""The pipeline: drafter and target brought together, one session a request."""

from crossdraft.pipeline.chat import Chat, Message
from crossdraft.pipeline.connection import Pipeline, connect
from crossdraft.pipeline.events import Reason
from crossdraft.pipeline.generation import Generation, Token
from crossdraft.pipeline.governing import Choice
from crossdraft.pipeline.request import GenerationRequest, Overlap, RequestError
from crossdraft.pipeline.statistics import Statistics
from crossdraft.verification.exchange import SamplingOptions
from crossdraft.verification.walk import Kind

__all__ = [
    "Chat",
    "Choice",
    "Generation",
    "GenerationRequest",
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
