"""Protobuf to plain values and back: what clients and the Generation service say to each other."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, cast

from crossdraft.rpc import codec
from crossdraft.rpc.errors import BadMessage
from crossdraft.rpc.generation import Figure, Generate, Generated, GenerationEnded, LaneCost, Reply, Served, Turn
from crossdraft.v1 import generation_pb2 as pb
from crossdraft.verification.walk import Kind

# Fields of both, of the same name and kind. Of the others, unset and empty are the same.
SCALARS = tuple(
    name
    for name in pb.GenerateRequest.DESCRIPTOR.fields_by_name
    if name not in ("text", "ids", "chat", "options", "stop", "committed", "overlap")
)


def encode_request(request: Generate) -> pb.GenerateRequest:
    """One request.

    Raises:
        ValueError: a value does not fit its field; the text says which.
    """
    given = {name: value for name in SCALARS if (value := getattr(request, name)) is not None}
    try:
        overlap = None if request.overlap is None else request.overlap.upper()
        message = pb.GenerateRequest(**given, stop=request.stop, committed=request.committed, overlap=overlap)
        if request.options is not None:
            message.options.CopyFrom(codec.encode_options(request.options))
        _encode_prompt(request.prompt, message)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return message


def _encode_prompt(prompt: str | tuple[int, ...] | tuple[Turn, ...], message: pb.GenerateRequest) -> None:
    if isinstance(prompt, str):
        message.text = prompt
    elif prompt and isinstance(prompt[0], Turn):
        message.chat.messages.extend(pb.ChatMessage(role=turn.role, content=turn.content) for turn in prompt)
    else:
        message.ids.ids.extend(cast(tuple[int, ...], prompt))
        message.ids.SetInParent()


def decode_request(message: pb.GenerateRequest) -> Generate:
    """One request; raises BadMessage."""
    given: dict[str, Any] = {name: getattr(message, name) for name in SCALARS if _is_set(message, name)}
    return Generate(
        _decode_prompt(message),
        options=codec.decode_options(message.options, None) if message.HasField("options") else None,
        stop=tuple(message.stop),
        committed=tuple(message.committed),
        overlap=_name(pb.GenerateRequest.Overlap, message.overlap, "overlap"),
        **given,
    )


def _decode_prompt(message: pb.GenerateRequest) -> str | tuple[int, ...] | tuple[Turn, ...]:
    match message.WhichOneof("prompt"):
        case "text" if message.text:
            return message.text
        case "ids" if message.ids.ids:
            return tuple(message.ids.ids)
        case "chat" if message.chat.messages:
            return tuple(Turn(one.role, one.content) for one in message.chat.messages)
        case _:
            raise BadMessage("there is no prompt; give text, ids or a chat, and at least one character, id or message")


def encode_reply(reply: Reply) -> pb.GenerateReply:
    """One reply."""
    match reply:
        case Generated():
            return pb.GenerateReply(token=_encode_token(reply))
        case GenerationEnded():
            ended = pb.Ended(id=reply.id, reason=reply.reason.upper())
            ended.statistics.CopyFrom(_encode_figures(reply.figures))
            return pb.GenerateReply(ended=ended)


def decode_reply(message: pb.GenerateReply) -> Reply:
    """One reply; raises BadMessage."""
    match message.WhichOneof("reply"):
        case "token":
            return _decode_token(message.token)
        case "ended":
            ended = message.ended
            reason = _name(pb.Ended.Reason, ended.reason, "ended.reason")
            return GenerationEnded(ended.id, reason, _decode_figures(ended.statistics))
        case _:
            raise BadMessage("a GenerateReply must be one of token and ended")


def _encode_token(token: Generated) -> pb.Token:
    return pb.Token(
        id=token.id,
        raw=token.raw,
        text=token.text,
        kind=token.kind.value.upper(),
        log_probability=token.log_probability,
        top=[pb.Candidate(id=other, raw=raw, log_probability=value) for other, raw, value in token.top],
        milliseconds=token.milliseconds,
    )


def _decode_token(message: pb.Token) -> Generated:
    kind = _name(pb.Token.Kind, message.kind, "token.kind")
    if kind == "unknown":
        raise BadMessage("token.kind is not set")
    return Generated(
        id=message.id,
        raw=message.raw,
        text=message.text,
        kind=Kind(kind),
        log_probability=message.log_probability if message.HasField("log_probability") else None,
        top=tuple((one.id, one.raw, one.log_probability) for one in message.top),
        milliseconds=message.milliseconds,
    )


def encode_models(models: Iterable[Served]) -> pb.ModelsReply:
    """What is served."""
    return pb.ModelsReply(
        models=[
            pb.Model(
                name=model.name,
                created=model.created,
                context=model.context,
                drafters=model.drafters,
                methods=model.methods,
                chats=model.chats,
            )
            for model in models
        ]
    )


def decode_models(message: pb.ModelsReply) -> tuple[Served, ...]:
    """What is served."""
    return tuple(
        Served(model.name, model.created, model.context, tuple(model.drafters), tuple(model.methods), model.chats)
        for model in message.models
    )


def _encode_figures(figures: Mapping[str, Figure]) -> pb.Statistics:
    lanes = cast(Iterable[LaneCost], figures.get("lanes", ()))
    counted = {name: value for name, value in figures.items() if name != "lanes"}
    return pb.Statistics(**cast(dict[str, Any], counted), lanes=[pb.Lane(**asdict(lane)) for lane in lanes])


def _decode_figures(message: pb.Statistics) -> Mapping[str, Figure]:
    figures: dict[str, Any] = _plain(message)
    return figures | {"lanes": tuple(LaneCost(**_plain(lane)) for lane in message.lanes)}


def _plain(message: pb.Statistics | pb.Lane) -> dict[str, Any]:
    """Its fields by name, lists as tuples."""
    values = ((field.name, getattr(message, field.name)) for field in message.DESCRIPTOR.fields)
    return {name: value if isinstance(value, str | int | float) else tuple(value) for name, value in values}


def _is_set(message: pb.GenerateRequest, name: str) -> bool:
    presence = message.DESCRIPTOR.fields_by_name[name].has_presence
    return message.HasField(cast(Any, name)) if presence else bool(getattr(message, name))


def _name(kinds: Any, number: int, field: str) -> str:
    """What the plain values call an enum's value; raises BadMessage if it has none."""
    if number not in kinds.values():
        raise BadMessage(f"{field} has the value {number}; known are {', '.join(kinds.keys())}")
    return cast(str, kinds.Name(number)).lower()
