"""What a replica sends back for an order. Errors travel as values: an exception of ours need not be unpickled."""

from dataclasses import dataclass

from crossdraft.pipeline import RequestError, Token
from crossdraft.pipeline.request import PromptTooLongError
from crossdraft.rpc.errors import NAMES, Internal, ServiceError
from crossdraft.serving.orders import Ended, OverloadedError, Traced, UnknownDrafterError, UnknownModelError

Expected = RequestError | UnknownModelError | OverloadedError | ServiceError
EXPECTED = (RequestError, UnknownModelError, OverloadedError, ServiceError)
SERVICE_ERRORS = {kind.__name__: kind for kind in NAMES if issubclass(kind, ServiceError)}


@dataclass(frozen=True)
class Began:
    """The first one: the order has been taken up."""

    target: str  # what the targets run, in one word
    orchestrator: str  # which one; no other process ever has the same name


@dataclass(frozen=True)
class Alive:
    """Nothing new, but it is being worked on."""


@dataclass(frozen=True)
class Refusal:
    """The order ends with an error."""

    name: str  # of the error's class
    text: str
    after: float = 0.0  # seconds until it may be asked again, where that helps
    field: str = ""  # of the request, where it is that one's fault

    @staticmethod
    def of(error: Expected) -> "Refusal":
        """As it was raised."""
        after = error.after if isinstance(error, OverloadedError) else 0.0
        field = error.field if isinstance(error, RequestError) else ""
        return Refusal(type(error).__name__, str(error), after, field)

    def error(self) -> Expected:
        """To be raised again."""
        match self.name:
            case "PromptTooLongError":
                return PromptTooLongError(self.text, self.field)
            case "RequestError":
                return RequestError(self.text, self.field)
            case "UnknownDrafterError":
                return UnknownDrafterError(self.text)
            case "UnknownModelError":
                return UnknownModelError(self.text)
            case "OverloadedError":
                return OverloadedError(self.text, self.after)
        return SERVICE_ERRORS.get(self.name, Internal)(self.text)


Piece = Began | Token | Traced | Ended | Alive | Refusal
