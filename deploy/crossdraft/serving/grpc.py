"""Outputs over gRPC: the service crossdraft.v1.Generation before `Outputs`."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NoReturn, Self

from crossdraft.client import GenerationRequest, Reason, RequestError, Statistics, Token
from crossdraft.rpc import errors
from crossdraft.rpc.generation import (
    SERVICE,
    Generate,
    Generated,
    GenerationEnded,
    GenerationHandlers,
    LaneCost,
    Reply,
    Served,
    Turn,
)
from crossdraft.rpc.server import Endpoint, Listening
from crossdraft.rpc.transport import FRONT_SERVER_OPTIONS, MessageLimit
from crossdraft.serving.limits import KeyRefusedError, Keys, RateLimit, Rates
from crossdraft.serving.outputs import Ended, Order, Outputs, OverloadedError, ServedModel, UnknownModelError
from crossdraft.types.request import Chat, Message
from crossdraft.types.statistics import LaneFigures, Trips

log = logging.getLogger(__name__)
REQUEST_LIMIT = MessageLimit(4)  # a prompt for a context of a million tokens is as large
SHORTEST_WAIT = 1.0  # seconds that a client is asked to wait where nobody knows how long
REPORTED_EVERY = 1.0  # seconds between two questions of the health service which models are there


@dataclass(frozen=True)
class GenerationOptions:
    """Who may ask, and for how long outputs wait for their readers.

    Raises:
        ValueError: a value is out of its range.
    """

    keys: Keys = field(default_factory=Keys)  # none: everybody may ask
    rate: RateLimit | None = None  # of outputs and lists of models, for each holder of a key, else for each address
    stalled_seconds: float = 60.0  # after which a client that does not read is given up

    def __post_init__(self) -> None:
        if not 0 < self.stalled_seconds < float("inf"):
            raise ValueError(f"stalled_seconds must be above 0, got {self.stalled_seconds}")


class GenerationService:
    """Makes orders of what clients ask for, and replies of what comes of them."""

    def __init__(
        self, outputs: Outputs, options: GenerationOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._outputs = outputs
        self._keys = options.keys
        self._rates = None if options.rate is None else Rates(options.rate)
        self._clock = clock

    def admit(self, authorization: str | None, peer: str) -> None:
        """Whether a client may ask at all, and now; raises KeyRefused or Overloaded if not."""
        try:
            holder = self._keys.holder(authorization)
        except KeyRefusedError as error:
            log.info("%s was refused: %s", peer, error)
            raise errors.KeyRefused(str(error)) from error
        client = holder or peer.rpartition(":")[0]
        wait = 0.0 if self._rates is None else self._rates.take(client, self._clock())
        if wait:
            raise errors.Overloaded("too many requests of this client", wait)

    async def models(self) -> tuple[Served, ...]:
        """What is served now."""
        return tuple(served(model) for model in await self._outputs.models())

    async def generate(self, request: Generate) -> AsyncGenerator[Reply, None]:
        """Tokens, then the end; closing it early gives everything back. Raises ServiceError."""
        began = time.monotonic()
        model = await self._model(request)
        with _errors_of_clients():
            order = Order(request.id, model, request_of(request), request.drafter)
            async with aclosing(self._outputs.stream(order)) as made:
                async for one in made:
                    match one:
                        case Token():
                            yield generated(one, 1000 * (time.monotonic() - began))
                        case Ended():
                            yield ended(one, request.id)

    async def _model(self, request: Generate) -> str:
        if request.model:
            return request.model
        names = [model.name for model in await self._outputs.models()]
        if not names:
            raise errors.Unreachable("no model can be served now; ask again later")
        if len(names) > 1:
            raise errors.BadRequest(f"name the model; there are {', '.join(names)}")
        return names[0]


@contextmanager
def _errors_of_clients() -> Iterator[None]:
    """Turns what goes wrong into what a client is told: what to change, or that no target is there, not where."""
    try:
        yield
    except RequestError as error:
        raise errors.BadRequest(str(error)) from error
    except UnknownModelError as error:
        raise errors.NameUnknown(str(error)) from error
    except OverloadedError as error:
        raise errors.Overloaded(str(error), error.after) from error
    except (errors.BadRequest, errors.ContextTooLong):
        raise
    except errors.TooLarge as error:
        raise errors.TooLarge("the prompt is too large for the target; shorten it") from error
    except errors.Full as error:
        text = "the targets have as many sessions as they take; ask again later"
        raise errors.Overloaded(text, SHORTEST_WAIT) from error
    except errors.ServiceError as error:
        log.info("an output failed: %s", error)
        raise errors.Unreachable("no target can make this output now; ask again later") from error


class GenerationServer:
    """A gRPC server of Generation, health and reflection. Must be made in a running event loop."""

    def __init__(self, outputs: Outputs, listening: Listening, options: GenerationOptions) -> None:
        self._outputs = outputs
        self.marks: dict[str, str] = {}  # what else the ready line says
        service = GenerationService(outputs, options)
        handlers = GenerationHandlers(service, options.stalled_seconds)
        self._endpoint = Endpoint(listening, {SERVICE: handlers.registered()}, FRONT_SERVER_OPTIONS)
        self._models: tuple[str, ...] = ()
        self._reporting: asyncio.Task[NoReturn] | None = None

    @property
    def address(self) -> str:
        """host:port, once it listens."""
        return self._endpoint.address

    async def start(self) -> str:
        """Begins to listen; returns the address; raises CannotListen."""
        models = await self._outputs.models()
        self._models = tuple(model.name for model in models)
        address = await self._endpoint.start(any(model.there for model in models))
        self._reporting = asyncio.create_task(self._report())
        return address

    async def drain(self) -> None:
        """Reports NOT_SERVING, takes no new output, lets open ones go on for the grace period, and ends."""
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.wait([self._reporting])
        await self._endpoint.drain()

    async def _report(self) -> NoReturn:
        """The health service says NOT_SERVING while no target of any model can be reached."""
        while True:
            await asyncio.sleep(REPORTED_EVERY)
            with suppress(OverloadedError):  # who makes them is busy, which changes nothing
                await self._endpoint.report(any(model.there for model in await self._outputs.models()))

    def ready_line(self) -> str:
        """One line of JSON that says where what is served."""
        line = {"ready": True, "role": "generation", "address": self.address, "models": self._models}
        return json.dumps(line | self.marks)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.drain()


def serve_generation(
    outputs: Outputs, listening: Listening | None = None, options: GenerationOptions | None = None
) -> GenerationServer:
    """A server to use with `async with`, or between `start` and `drain`.

    Args:
        outputs: what makes the outputs.
        listening: where, by default any free port of this machine; its message limit is that of requests.
        options: keys and patience.
    """
    return GenerationServer(outputs, listening or Listening(limit=REQUEST_LIMIT), options or GenerationOptions())


# Between what clients and Generation say over gRPC and the values of the pipeline, both ways.

# Of the same name and kind in both; of the others, `prompt` differs in kind.
SAME = tuple(sorted({one.name for one in fields(Generate)} & {one.name for one in fields(GenerationRequest)}))
SETTINGS = tuple(name for name in SAME if name != "prompt")
FIGURES = tuple(one.name for one in fields(Statistics))
OF_LANES = tuple(sorted({one.name for one in fields(LaneCost)} & {one.name for one in fields(LaneFigures)}))
STAYS_HERE = ("explain", "record")  # of a GenerationRequest: what only the process can do that makes the output


def request_of(asked: Generate) -> GenerationRequest:
    """What a client asks for; raises RequestError."""
    given = {name: value for name in SETTINGS if (value := getattr(asked, name)) is not None}
    prompt = asked.prompt
    if isinstance(prompt, str):
        return GenerationRequest(prompt, **given)
    turns = [one for one in prompt if isinstance(one, Turn)]
    if turns:
        return GenerationRequest(Chat(tuple(Message(one.role, one.content) for one in turns)), **given)
    return GenerationRequest(tuple(one for one in prompt if not isinstance(one, Turn)), **given)


def asked_of(request: GenerationRequest, model: str = "", drafter: str | None = None, name: str = "") -> Generate:
    """What asks for an output of this request.

    Args:
        request: what to generate.
        model: of the server; empty: its only one.
        drafter: of the model; None: its default one, empty: none.
        name: id of the request; empty: the server makes one.

    Raises:
        RequestError: a server cannot do what it asks for.
    """
    for kept in STAYS_HERE:
        if getattr(request, kept):
            raise RequestError(f"{kept} is not for a server: leave it out (--{kept}), or generate with --target")
    given: dict[str, Any] = {one: getattr(request, one) for one in SETTINGS}
    return Generate(_prompt(request), id=name, model=model, drafter=drafter, **given)


def _prompt(request: GenerationRequest) -> str | tuple[int, ...] | tuple[Turn, ...]:
    if isinstance(request.prompt, Chat):
        return tuple(Turn(one.role, one.content) for one in request.prompt.messages)
    return request.prompt


def generated(token: Token, milliseconds: float) -> Generated:
    """A token, to be sent."""
    return Generated(token.id, token.raw, token.text, token.kind, token.log_probability, token.top, milliseconds)


def token_of(sent: Generated) -> Token:
    """A token that was sent."""
    return Token(sent.id, sent.text, sent.raw, sent.kind, sent.log_probability, sent.top)


def ended(end: Ended, name: str) -> GenerationEnded:
    """The end of the output of a request of this id, to be sent."""
    figures = {figure: getattr(end.statistics, figure) for figure in FIGURES}
    return GenerationEnded(name, end.reason.value, figures | {"lanes": tuple(map(_cost, end.statistics.lanes))})


def ended_of(sent: GenerationEnded) -> Ended:
    """An end that was sent; raises ValueError if its reason is unknown."""
    figures: Mapping[str, Any] = sent.figures
    lanes = tuple(map(_lane, figures.get("lanes", ())))
    return Ended(Reason(sent.reason), Statistics(**{**figures, "lanes": lanes}))


def _cost(lane: LaneFigures) -> LaneCost:
    """Without its address: where services are is no client's to know."""
    figures = {name: getattr(lane, name) for name in OF_LANES}
    trips = lane.trips
    return LaneCost(
        trip_counts=trips.counts, trip_seconds=trips.seconds, queued_seconds=trips.queued_seconds, **figures
    )


def _lane(cost: LaneCost) -> LaneFigures:
    figures = {name: getattr(cost, name) for name in OF_LANES}
    return LaneFigures(address="", trips=Trips(cost.trip_counts, cost.trip_seconds, cost.queued_seconds), **figures)


def served(model: ServedModel) -> Served:
    """A model, to be sent. Whether it is there now, the health service says."""
    figures = asdict(model)
    del figures["there"]
    return Served(**figures)


def model_of(sent: Served) -> ServedModel:
    """A model that was sent."""
    return ServedModel(**asdict(sent))
