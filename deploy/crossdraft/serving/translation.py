"""Between what clients and Generation say over gRPC and the values of the pipeline, both ways."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from crossdraft.pipeline import GenerationRequest, Reason, RequestError, Statistics, Token
from crossdraft.pipeline.chat import Chat, Message
from crossdraft.pipeline.trips import LaneFigures, Trips
from crossdraft.rpc.generation import Generate, Generated, GenerationEnded, LaneCost, Served, Turn
from crossdraft.serving.orders import Ended, ServedModel

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
