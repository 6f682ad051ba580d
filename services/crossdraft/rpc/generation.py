"""What clients and the Generation service say to each other, as plain values."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self, cast

import grpc
from google.protobuf.message import DecodeError

from crossdraft.rpc import codec, log_context
from crossdraft.rpc.errors import (
    PUSHBACK,
    BadMessage,
    BadRequest,
    Cancelled,
    Internal,
    NotServed,
    ServiceError,
    TimedOut,
    from_status,
    to_status,
    to_trailer,
)
from crossdraft.rpc.log_context import REQUEST_ID, RequestIdError
from crossdraft.rpc.transport import FRONT_CLIENT_OPTIONS, MessageLimit
from crossdraft.types.messages import SamplingOptions
from crossdraft.types.statistics import Kind
from crossdraft.v1 import generation_pb2 as pb


@dataclass(frozen=True)
class LaneCost:
    """What one session with a service cost. The fields are those of the proto."""

    role: str
    bytes_sent: int
    bytes_received: int
    trip_counts: tuple[int, ...]
    trip_seconds: float
    queued_seconds: float
    model_seconds: float
    codec_seconds: float
    open_seconds: float
    idle_seconds: float
    lost: str


Figure = str | int | float | tuple[int, ...] | tuple[LaneCost, ...]


@dataclass(frozen=True)
class Turn:
    """What somebody says in a chat."""

    role: str  # such as system, user, assistant
    content: str


@dataclass(frozen=True)
class Generate:
    """Asks for one output. None: the server's default."""

    prompt: str | tuple[int, ...] | tuple[Turn, ...]  # text, target ids, or a chat; the empty tuple is no ids
    id: str = ""  # of the request; empty: the server makes one
    model: str = ""  # empty: the only one
    drafter: str | None = None  # one of the model's; empty: plain decoding
    options: SamplingOptions | None = None
    method: str | None = None
    k: int | None = None
    max_tokens: int | None = None
    drafter_temperature: float | None = None
    seed: int | None = None
    choice: int | None = None
    ignore_eos: bool | None = None
    stop: tuple[str, ...] | None = None
    logprobs: int | None = None
    committed: tuple[int, ...] | None = None  # output ids that were delivered already
    allow_inexact: bool | None = None
    audit: bool | None = None
    overlap: str | None = None  # auto, on or off
    window: int | None = None
    wait: int | None = None
    branches: int | None = None
    branch_width: int | None = None
    paths: int | None = None
    speculation: bool | None = None
    row_width: int | None = None
    head: int | None = None


@dataclass(frozen=True)
class Generated:
    """A committed token."""

    id: int
    raw: bytes  # its own; empty for a control symbol
    text: str  # to show since the token before
    kind: Kind
    log_probability: float | None  # nats, of the model itself
    top: tuple[tuple[int, bytes, float], ...]  # id, own bytes, nats; the most probable first
    milliseconds: float  # from the request's arrival until it was committed


@dataclass(frozen=True)
class GenerationEnded:
    """The end of an output, after its tokens."""

    id: str  # of the request
    reason: str  # stop, length, cancelled or failed
    figures: Mapping[str, Figure]  # by their names in the proto


@dataclass(frozen=True)
class Served:
    """A model that outputs can be asked of."""

    name: str
    created: int  # seconds since 1970, when it began to be served
    context: int  # tokens, prompt and output together
    drafters: tuple[str, ...]  # the default one first; none: decoding is plain
    methods: tuple[str, ...]  # that its drafters allow
    chats: bool  # it has a chat template of its own


Reply = Generated | GenerationEnded


# Protobuf to plain values and back: what clients and the Generation service say to each other.

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


# A client of Generation that speaks in plain values.


@dataclass(eq=False)
class GenerationClient:
    """One channel to a server of Generation. Must be made in a running event loop, and closed."""

    address: str  # host:port
    key: str = field(default="", repr=False)  # for the API; empty: none
    tls: grpc.ChannelCredentials | None = None  # of `security.trusting_credentials`; None: plaintext
    reply_seconds: float = 300.0  # without any reply, before the server is given up
    limit: MessageLimit = field(default_factory=MessageLimit)
    _channel: grpc.aio.Channel = field(init=False, repr=False)

    def __post_init__(self) -> None:
        options = FRONT_CLIENT_OPTIONS + self.limit.options()
        if self.tls is None:
            self._channel = grpc.aio.insecure_channel(self.address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(self.address, self.tls, options=options)

    @property
    def server(self) -> str:
        """What error texts call it."""
        return f"server at {self.address}"

    async def models(self) -> tuple[Served, ...]:
        """What is served now; raises ServiceError."""
        method = self._channel.unary_unary(
            f"/{SERVICE}/Models", pb.ModelsRequest.SerializeToString, pb.ModelsReply.FromString
        )
        async with self._foreign_errors():
            call = method(pb.ModelsRequest(), timeout=self.reply_seconds, metadata=self._metadata)
            return decode_models(await call)

    async def generate(self, request: Generate, deadline_seconds: float | None = None) -> AsyncGenerator[Reply, None]:
        """One output: its tokens as they are committed, then its end. Closing it early cancels it.

        Args:
            request: what is asked for.
            deadline_seconds: for all of it; the server gives it up then, too.

        Raises:
            BadRequest: the request cannot be served; the text says what to change.
            NameUnknown, KeyRefused, Overloaded, TimedOut, ServiceError: as their names say.
        """
        try:
            message = encode_request(request)
        except ValueError as error:
            raise BadRequest(str(error)) from error
        method = self._channel.unary_stream(
            f"/{SERVICE}/Generate", pb.GenerateRequest.SerializeToString, pb.GenerateReply.FromString
        )
        call = method(message, timeout=deadline_seconds, metadata=self._metadata)
        try:
            while (reply := await self._read(call)) is not None:
                yield reply
                if isinstance(reply, GenerationEnded):
                    return
            raise Internal(f"{self.server} ended an output without a word")
        finally:
            call.cancel()

    async def close(self) -> None:
        """Closes the channel, and with it all its outputs."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        """Turns what gRPC raises into what it means."""
        try:
            yield
        except TimeoutError as error:
            raise TimedOut(f"{self.server}: no reply within {self.reply_seconds:g} s") from error
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise NotServed(
                    f"what listens at {self.address} does not serve {SERVICE}; check the address"
                ) from error
            trailer = cast(Iterable[tuple[str, str | bytes]], error.trailing_metadata() or ())  # the stubs differ
            pushback = next((value for key, value in trailer if key == PUSHBACK), "")
            raise from_status(error.code(), error.details(), self.server, pushback) from error
        except (BadMessage, DecodeError) as error:
            raise Internal(f"{self.server} sent a reply that means nothing: {error}") from error
        except asyncio.CancelledError as error:
            # gRPC raises it, too, in a task that reads from a call that was ended elsewhere.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise Cancelled(f"{self.server}: the call was cancelled") from error


# The server's half of Generation: keys before anything else, replies as they are made, errors as status codes.

log = logging.getLogger(__name__)
SERVICE = "crossdraft.v1.Generation"
KEY = "authorization"  # in the metadata
Context = grpc.aio.ServicerContext[bytes, bytes]


class Generator(Protocol):
    """What makes outputs for clients."""

    def admit(self, authorization: str | None, peer: str) -> None:
        """Whether a client may ask at all; raises ServiceError if not.

        Args:
            authorization: what it says of itself, if anything.
            peer: its address, as gRPC has it.
        """
        ...

    async def models(self) -> tuple[Served, ...]:
        """What is served now."""
        ...

    def generate(self, request: Generate) -> AsyncGenerator[Reply, None]:
        """Tokens, then the end; closing it early gives everything back. Raises ServiceError."""
        ...


class GenerationHandlers:
    """Answers the methods of Generation. Messages come as bytes, so that their faults get the right status.

    Args:
        service: what makes the outputs.
        stalled_seconds: after which a client that does not read is given up.
    """

    def __init__(self, service: Generator, stalled_seconds: float) -> None:
        self._service = service
        self._stalled_seconds = stalled_seconds

    def registered(self) -> "grpc.GenericRpcHandler[bytes, bytes]":
        """As gRPC wants them."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(self.generate),
                "Models": grpc.unary_unary_rpc_method_handler(self.models),
            },
        )

    async def models(self, request: bytes, context: Context) -> bytes:
        """What is served; the request has no fields."""
        try:
            self._admit(context)
            return encode_models(await self._service.models()).SerializeToString()
        except ServiceError as error:
            await _abort(error, context)

    async def generate(self, request: bytes, context: Context) -> None:
        """One output. It ends with its last token, with the client's cancellation or deadline, or with an error."""
        try:
            self._admit(context)
            asked = _decoded(request, context)
            with log_context.about(request=asked.id, peer=context.peer()):
                await context.send_initial_metadata(((REQUEST_ID, asked.id),))
                async with aclosing(self._service.generate(asked)) as replies:
                    async for reply in replies:
                        await self._write(reply, context)
        except ServiceError as error:
            await _abort(error, context)
        except grpc.aio.InternalError as error:  # what a write becomes when the client ends the call meanwhile
            log.debug("the client has gone: %s", error)

    def _admit(self, context: Context) -> None:
        self._service.admit(_metadata(context, KEY), context.peer())

    async def _write(self, reply: Reply, context: Context) -> None:
        """Waits while the client reads more slowly than replies are made."""
        raw = encode_reply(reply).SerializeToString()
        try:
            async with asyncio.timeout(self._stalled_seconds):
                await context.write(raw)
        except TimeoutError as error:
            raise Cancelled(f"nothing was read for {self._stalled_seconds:g} s") from error


def _decoded(raw: bytes, context: Context) -> Generate:
    """The request, with an id in any case; raises BadMessage."""
    try:
        asked = decode_request(pb.GenerateRequest.FromString(raw))
        return replace(asked, id=log_context.request_id(asked.id or _metadata(context, REQUEST_ID)))
    except DecodeError as error:
        raise BadMessage(f"not a GenerateRequest: {error}") from error
    except RequestIdError as error:
        raise BadMessage(str(error)) from error


def _metadata(context: Context, name: str) -> str | None:
    found = next((value for key, value in context.invocation_metadata() or () if key == name), None)
    return found.decode("ascii", "replace") if isinstance(found, bytes) else found


async def _abort(error: ServiceError, context: Context) -> NoReturn:
    code, text = to_status(error)
    await context.abort(code, text, to_trailer(error))
