"""The service Generation: its messages as plain values, their codec, and a client."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Self, cast

import grpc
from google.protobuf.message import DecodeError

from crossdraft.config.fields import bare_key, fault_of_address
from crossdraft.rpc import codec, errors, logs
from crossdraft.rpc.transport import FRONT_CLIENT_OPTIONS, MessageLimit, channel_to
from crossdraft.session.events import Reason
from crossdraft.types.messages import MODEL_SETTINGS, LeftOut
from crossdraft.types.output import PromptToken, ServedModel, Token
from crossdraft.types.request import Chat, GenerationRequest, Message, Overlap, Prompt, RequestError
from crossdraft.types.statistics import Kind, LaneFigures, Statistics, Trips
from crossdraft.v1 import generation_pb2 as pb

SERVICE = "crossdraft.v1.Generation"
KEY = "authorization"  # in the metadata


@dataclass(frozen=True)
class Generate:
    """Asks for one output."""

    request: GenerationRequest  # all but `explain` and `record`, which are for the process that runs the session
    id: str = ""  # of the request; empty: the server makes one
    model: str = ""  # empty: the only one
    drafter: str | None = None  # one of the model's; None: its default one; empty: plain decoding
    together: bool = True  # the client takes replies of several tokens


@dataclass(frozen=True)
class Committed:
    """The next tokens, as many as were decided together, for instance by one pass; at least one."""

    tokens: tuple[Token, ...]
    milliseconds: float = 0.0  # in a reply: from the request's arrival until they were committed
    target: str = ""  # fingerprint of the model that made them; not in a reply


@dataclass(frozen=True)
class PromptTokens:
    """Some tokens of the prompt, in order; before all others, and only for a request with `prompt_logprobs`."""

    tokens: tuple[PromptToken, ...]
    first: int = 0  # index of the first of them; a reply does not say it


@dataclass(frozen=True)
class OutputEnded:
    """The end of an output, after its tokens."""

    reason: Reason
    statistics: Statistics  # in a reply: without the addresses of services
    id: str = ""  # of the request, in a reply


Reply = PromptTokens | Committed | OutputEnded

# Fields of GenerationRequest as the proto has them, but for the prompt, the options and the method of overlap.
SETTINGS = tuple(
    setting.name
    for setting in fields(GenerationRequest)
    if setting.name not in ("prompt", "options", "overlap", "explain", "record")
)
DEFAULTS = {setting.name: setting.default for setting in fields(GenerationRequest)}


def encode_request(asked: Generate) -> pb.GenerateRequest:
    """One request. Fields that have the default of both sides, or are left out, are unset.

    Raises ValueError: a value does not fit its field; the text says which.
    """
    request = asked.request
    given = {name: value for name in SETTINGS if (value := getattr(request, name)) != DEFAULTS[name]}
    if not isinstance(request.max_tokens, LeftOut):
        given["max_tokens"] = request.max_tokens
    given |= {name: getattr(asked, name) for name in ("id", "model", "drafter", "together")}
    message = pb.GenerateRequest(overlap=request.overlap.name)
    for name, value in given.items():
        try:
            message.MergeFrom(pb.GenerateRequest(**{name: value}))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from error
    try:
        options = codec.encode_options(request.options)
        for name in MODEL_SETTINGS:
            number = getattr(request.options, name)
            if isinstance(number, LeftOut):
                options.ClearField(name)
            else:  # also if it is zero
                setattr(options, name, number)
        if options.ByteSize():
            message.options.CopyFrom(options)
        _encode_prompt(request.prompt, message)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the request: {error}") from error
    return message


def _encode_prompt(prompt: Prompt, message: pb.GenerateRequest) -> None:
    match prompt:
        case str():
            message.text = prompt
        case Chat():
            message.chat.messages.extend(pb.ChatMessage(**vars(said)) for said in prompt.messages)
            if not prompt.add_generation_prompt:
                message.chat.add_generation_prompt = False
            message.chat.continue_final_message = prompt.continue_final_message
            message.chat.template_kwargs = prompt.template_kwargs
        case _:
            message.ids.ids.extend(prompt)


def parse_request(raw: bytes, name: str | None) -> pb.GenerateRequest:
    """The message, with an id in any case, if need be this one; raises BadMessage."""
    try:
        message = pb.GenerateRequest.FromString(raw)
        message.id = logs.request_id(message.id or name)
    except DecodeError as error:
        raise errors.BadMessage(f"not a GenerateRequest: {error}") from error
    return message


def decode_request(message: pb.GenerateRequest) -> Generate:
    """One request; raises BadRequest."""
    codec.check_known(message, "the request")
    given = {field.name: codec.plain_value(value) for field, value in message.ListFields() if field.name in SETTINGS}
    if message.HasField("options"):
        given["options"] = codec.decode_options(message.options, None)
    overlap = Overlap(_name(pb.GenerateRequest.Overlap, message.overlap, "overlap"))
    try:
        request = GenerationRequest(_decode_prompt(message), overlap=overlap, **given)
    except RequestError as error:
        raise errors.BadRequest(str(error)) from error
    named = codec.plain_fields(message)
    return Generate(request, **{name: named[name] for name in ("id", "model", "drafter", "together") if name in named})


def _decode_prompt(message: pb.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "ids" if message.ids.ids:
            return tuple(message.ids.ids)
        case "chat" if message.chat.messages:
            said = tuple([Message(**codec.plain_fields(one)) for one in message.chat.messages])
            return Chat(said, **codec.plain_fields(message.chat))
        case _:
            what = "give text, ids or a chat, with a character, id or message at least"
            raise errors.BadMessage(f"there is no prompt; {what}")


def encode_reply(reply: Reply) -> pb.GenerateReply:
    match reply:
        case Committed():
            first, *more = (_encode_token(token, reply.milliseconds) for token in reply.tokens)
            return pb.GenerateReply(token=first, more=more)
        case PromptTokens():
            return pb.GenerateReply(prompt=pb.PromptTokens(tokens=map(_encode_token, reply.tokens)))
        case OutputEnded():
            statistics = _encode_statistics(reply.statistics)
            return pb.GenerateReply(ended=pb.Ended(id=reply.id, reason=reply.reason.name, statistics=statistics))


def decode_reply(message: pb.GenerateReply) -> Reply:
    """One reply; raises BadMessage."""
    match message.WhichOneof("reply"):
        case "token":
            return Committed(tuple(map(_decode_token, (message.token, *message.more))), message.token.milliseconds)
        case "prompt":
            return PromptTokens(tuple(PromptToken(rank=one.rank, **_plain_token(one)) for one in message.prompt.tokens))
        case "ended":
            ended, told = message.ended, message.ended.statistics
            reason = Reason(_name(pb.Ended.Reason, ended.reason, "ended.reason", needed=True))
            given = {"lanes": tuple(map(_decode_lane, told.lanes)), "settings": dict(told.settings)}
            return OutputEnded(reason, Statistics(**codec.plain_fields(told) | given), ended.id)
        case _:
            raise errors.BadMessage("a GenerateReply must be one of prompt, token and ended")


def _encode_token(token: Token | PromptToken, milliseconds: float = 0.0) -> pb.Token:
    changed: dict[str, Any] = {
        "top": [pb.Candidate(id=other, raw=raw, log_probability=value) for other, raw, value in token.top],
        "names": dict(token.names),
    }
    if isinstance(token, Token):
        changed["kind"] = token.kind.name
    return pb.Token(**vars(token) | changed, milliseconds=milliseconds)


def _decode_token(message: pb.Token) -> Token:
    kind = _name(pb.Token.Kind, message.kind, "token.kind", needed=True)
    return Token(kind=Kind(kind), **_plain_token(message))


def _plain_token(message: pb.Token) -> dict[str, Any]:
    return {
        "id": message.id,
        "raw": message.raw,
        "text": message.text,
        "log_probability": message.log_probability if message.HasField("log_probability") else None,
        "top": tuple((likely.id, likely.raw, likely.log_probability) for likely in message.top),
        "names": tuple(sorted(message.names.items())),
    }


def encode_models(models: Iterable[ServedModel]) -> pb.ModelsReply:
    fields = pb.Model.DESCRIPTOR.fields_by_name
    return pb.ModelsReply(models=[pb.Model(**{name: getattr(model, name) for name in fields}) for model in models])


def decode_models(message: pb.ModelsReply) -> tuple[ServedModel, ...]:
    return tuple(ServedModel(**codec.plain_fields(model)) for model in message.models)


def _encode_statistics(statistics: Statistics) -> pb.Statistics:
    given = {name: value for name, value in vars(statistics).items() if name != "lanes"}
    given["drafter_lost"] = errors.without_addresses(statistics.drafter_lost)
    return pb.Statistics(**given, lanes=map(_encode_lane, statistics.lanes))


def _encode_lane(lane: LaneFigures) -> pb.Lane:
    """Without the service's address, which clients must not see."""
    given = {name: value for name, value in vars(lane).items() if name not in ("address", "trips")}
    trips = lane.trips
    return pb.Lane(**given, trip_counts=trips.counts, trip_seconds=trips.seconds, queued_seconds=trips.queued_seconds)


def _decode_lane(message: pb.Lane) -> LaneFigures:
    given = codec.plain_fields(message)
    trips = Trips(given.pop("trip_counts"), given.pop("trip_seconds"), given.pop("queued_seconds"))
    return LaneFigures(address="", trips=trips, **given)


def _name(kinds: Any, number: int, field: str, needed: bool = False) -> str:
    """The lower-case name of an enum's value; raises BadMessage if it has none, or is not set and needed."""
    if number not in kinds.values():
        raise errors.BadMessage(f"{field} has the value {number}; known are {', '.join(kinds.keys())}")
    if needed and not number:
        raise errors.BadMessage(f"{field} is not set")
    return cast(str, kinds.Name(number)).lower()


@dataclass(eq=False)
class GenerationClient:
    """One channel to a server of Generation. Must be made in a running event loop, and closed. Raises ValueError: the
    address is not host:port, or the key has what no key has."""

    address: str  # host:port
    key: str = field(default="", repr=False)  # for the API; empty: none
    tls: grpc.ChannelCredentials | None = None  # of `security.trusting_credentials`; None: plaintext
    reply_seconds: float = 300.0  # without any reply, before the server is given up
    limit: MessageLimit = field(default_factory=MessageLimit)
    _channel: grpc.aio.Channel = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if fault := fault_of_address(self.address):
            raise ValueError(f"the address of a server {fault}")
        self.key = bare_key(self.key)
        self._channel = channel_to(self.address, self.tls, FRONT_CLIENT_OPTIONS + self.limit.options())

    @property
    def server(self) -> str:
        return f"server at {self.address}"

    async def models(self) -> tuple[ServedModel, ...]:
        """What is served now; raises ServiceError."""
        method = self._channel.unary_unary(
            f"/{SERVICE}/Models", pb.ModelsRequest.SerializeToString, pb.ModelsReply.FromString
        )
        async with self._foreign_errors():
            call = method(pb.ModelsRequest(), timeout=self.reply_seconds, metadata=self._metadata)
            return decode_models(await call)

    async def replies(self, request: Generate, deadline_seconds: float | None = None) -> AsyncGenerator[Reply, None]:
        """One output: its tokens as they are committed, then its end. Closing it early cancels it, and so does its
        deadline.

        Raises ServiceError, of which BadRequest, NameUnknown, KeyRefused, Overloaded and TimedOut as their names say.
        """
        try:
            message = encode_request(request)
        except ValueError as error:
            raise errors.BadRequest(str(error)) from error
        method = self._channel.unary_stream(
            f"/{SERVICE}/Generate", pb.GenerateRequest.SerializeToString, pb.GenerateReply.FromString
        )
        call = method(message, timeout=deadline_seconds, metadata=self._metadata)
        try:
            while (reply := await self._read(call)) is not None:
                yield reply
                if isinstance(reply, OutputEnded):
                    return
            raise errors.Internal(f"{self.server} ended an output without its last reply")
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return ((KEY, f"Bearer {self.key}"),) if self.key else ()

    async def _read(self, call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateReply]") -> Reply | None:
        async with self._foreign_errors(), asyncio.timeout(self.reply_seconds):
            message = await call.read()
            return decode_reply(message) if isinstance(message, pb.GenerateReply) else None

    @asynccontextmanager
    async def _foreign_errors(self) -> AsyncIterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise errors.TimedOut(f"{self.server}: no reply within {self.reply_seconds:g} s") from error
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                what = f"what listens at {self.address} does not serve {SERVICE}"
                raise errors.NotServed(f"{what}; check the address") from error
            trailer = cast(Iterable[tuple[str, str | bytes]], error.trailing_metadata() or ())  # the stubs differ
            pushback = next((value for key, value in trailer if key == errors.PUSHBACK), "")
            raise errors.from_status(error.code(), error.details(), self.server, pushback) from error
        except (errors.BadMessage, DecodeError) as error:
            raise errors.Internal(f"{self.server} sent a reply that cannot be decoded: {error}") from error
        except asyncio.CancelledError as error:
            # gRPC raises it, too, in a task that reads from a call that was ended elsewhere.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise errors.Cancelled(f"{self.server}: the call was cancelled") from error
