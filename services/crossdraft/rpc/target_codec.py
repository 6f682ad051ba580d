"""Frames of a target's link: protobuf messages to plain values and back."""

from collections.abc import Iterator, Sequence
from typing import assert_never

from crossdraft.rpc import codec
from crossdraft.rpc.codec import check_max
from crossdraft.rpc.errors import BadMessage
from crossdraft.rpc.frames import BeginSession, EndSession, RoleCodec, SessionEnded, Shares, check_frame
from crossdraft.types.messages import (
    MOST_DRAFT_TOKENS,
    MOST_LIKELY,
    MOST_RUN,
    FetchRow,
    Opened,
    OpenTarget,
    Pass,
    PassDone,
    PromptScored,
    RowFetched,
    RunTo,
    Sample,
    ScorePrompt,
)
from crossdraft.types.rows import Ids, Row
from crossdraft.types.trees import ROOT, TokenTree
from crossdraft.v1 import common_pb2
from crossdraft.v1 import target_pb2 as pb

Request = BeginSession[OpenTarget] | Pass | FetchRow | RunTo | ScorePrompt | EndSession
Reply = Opened | PassDone | RowFetched | PromptScored | SessionEnded
DEFAULT_HEAD = 64  # ids of a row that travel when the client does not say how many
MAX_HEAD = 4096
MAX_NODES = 17 * MOST_DRAFT_TOKENS  # of a pass's tree: sixteen paths, and some


def encode_requests(messages: Sequence[tuple[int, Request]]) -> bytes:
    frame, listed = pb.VerifyRequests(), list[Ids]()
    for session, request in messages:
        match request:
            case Pass():
                listed += request.listed
                frame.requests.add(session=session, next_pass=_encode_pass(request))
            case RunTo():
                frame.requests.add(session=session, run_to=pb.RunTo(number=request.number, tokens=request.tokens))
            case FetchRow():
                fetch = pb.FetchRow(**vars(request) | {"listed": codec.encode_ids(request.listed)})
                frame.requests.add(session=session, fetch=fetch)
            case ScorePrompt():
                frame.requests.add(session=session, score=pb.ScorePrompt(**vars(request)))
            case BeginSession():
                opening = _encode_open(request.opening)
                frame.requests.add(session=session, open=opening, request_id=request.request_id)
            case EndSession():
                frame.requests.add(session=session, close=common_pb2.CloseSession())
            case _:
                assert_never(request)
    if listed:
        frame.listed.CopyFrom(codec.encode_lists(codec.joined(listed)))
    return frame.SerializeToString()


def decode_requests(raw: bytes, vocabulary_size: int | None) -> Iterator[tuple[int, Request | BadMessage]]:
    """The messages of a frame to a target; raises BadMessage or DecodeError."""
    frame = pb.VerifyRequests.FromString(raw)
    check_frame(raw, frame.requests)
    listed = Shares(codec.decode_lists(frame.listed, "listed", vocabulary_size).split(), "lists")
    for message in frame.requests:
        share = listed.take(message.next_pass.listed) if message.HasField("next_pass") else ()
        try:
            yield message.session, _decode_request(message, share, vocabulary_size)
        except BadMessage as error:
            yield message.session, error
    listed.check()


def _decode_request(message: pb.VerifyRequest, listed: Sequence[Ids], vocabulary_size: int | None) -> Request:
    match message.WhichOneof("message"):
        case "next_pass":
            return _decode_pass(message.next_pass, listed, vocabulary_size)
        case "run_to":
            return RunTo(message.run_to.number, message.run_to.tokens)
        case "fetch":
            return _decode_fetch(message.fetch, vocabulary_size)
        case "score":
            _check_likely(message.score.likely)
            return ScorePrompt(message.score.first, message.score.likely)
        case "open":
            return BeginSession(_decode_open(message.open, vocabulary_size), message.request_id)
        case "close":
            return EndSession()
        case _:
            raise BadMessage("a VerifyRequest must be one of open, next_pass, fetch, run_to, score and close")


def encode_replies(messages: Sequence[tuple[int, Reply]]) -> bytes:
    """A frame from a target; raises ValueError if a pass has neither rows nor samples, or both."""
    frame, rows, samples = pb.VerifyReplies(), list[Row](), list[Sample]()
    for session, reply in messages:
        match reply:
            case PassDone():
                frame.replies.add(session=session, done=_encode_done(reply, rows, samples))
            case RowFetched():
                frame.replies.add(session=session, fetched=_encode_fetched(reply))
            case PromptScored():
                samples += reply.tokens
                frame.replies.add(session=session, scored=_encode_scored(reply))
            case Opened():
                frame.replies.add(session=session, opened=common_pb2.Opened(fingerprint=reply.fingerprint))
            case SessionEnded():
                frame.replies.add(session=session, ended=common_pb2.SessionEnded(**vars(reply)))
            case _:
                assert_never(reply)
    if rows:
        frame.rows.CopyFrom(codec.encode_rows(rows))
    if samples:
        frame.samples.CopyFrom(codec.encode_samples(samples))
    return frame.SerializeToString()


def decode_replies(raw: bytes, vocabulary_size: int | None) -> Iterator[tuple[int, Reply | BadMessage]]:
    """The messages of a frame from a target; raises BadMessage or DecodeError."""
    frame = pb.VerifyReplies.FromString(raw)
    check_frame(raw, frame.replies)
    rows = Shares(codec.decode_rows(frame.rows, "rows", vocabulary_size), "rows")
    samples = Shares(codec.decode_samples(frame.samples, vocabulary_size), "samples")
    for message in frame.replies:
        done = message.done
        nodes: tuple[Row | Sample, ...] = ()
        if message.HasField("done"):
            nodes = (*rows.take(done.rows), *samples.take(done.samples))
        elif message.HasField("scored"):
            nodes = tuple(samples.take(message.scored.samples))
        try:
            yield message.session, _decode_reply(message, nodes, vocabulary_size)
        except BadMessage as error:
            yield message.session, error
    rows.check()
    samples.check()


def _decode_reply(message: pb.VerifyReply, nodes: tuple[Row | Sample, ...], vocabulary_size: int | None) -> Reply:
    match message.WhichOneof("message"):
        case "done":
            return _decode_done(message.done, nodes)
        case "fetched":
            return _decode_fetched(message.fetched, vocabulary_size)
        case "scored":
            return _decode_scored(message.scored, nodes)
        case "opened":
            return Opened(message.opened.fingerprint)
        case "ended":
            return SessionEnded(message.ended.code, message.ended.text)
        case _:
            raise BadMessage("a VerifyReply must be one of opened, done, fetched, scored and ended")


ROLE: RoleCodec[OpenTarget, Pass | FetchRow | RunTo | ScorePrompt, PassDone | RowFetched | PromptScored] = RoleCodec(
    name="target",
    other="drafter",
    service="crossdraft.v1.Target",
    stream="Verify",
    encode_requests=encode_requests,
    decode_requests=decode_requests,
    encode_replies=encode_replies,
    decode_replies=decode_replies,
)


def _encode_open(request: OpenTarget) -> pb.OpenTarget:
    options, noise = codec.encode_options(request.options), codec.encode_noise(request.noise)
    return pb.OpenTarget(**vars(request) | {"options": options, "noise": noise})


def _decode_open(message: pb.OpenTarget, vocabulary_size: int | None) -> OpenTarget:
    if not message.prompt:
        raise BadMessage("prompt is empty; a target needs at least one id, for instance its begin of sequence")
    check_max(message.head, MAX_HEAD, "head")
    _check_likely(message.likely)
    return OpenTarget(
        prompt=codec.decode_id_tuple(message.prompt, "prompt", vocabulary_size),
        options=codec.decode_options(message.options, vocabulary_size),
        noise=codec.decode_noise(message),
        head=message.head if message.HasField("head") else DEFAULT_HEAD,
        likely=message.likely if message.HasField("likely") else None,
        ignore_stops=message.ignore_stops,
        stop_ids=codec.decode_id_tuple(message.stop_ids, "stop_ids", vocabulary_size, codec.MAX_STOPS),
    )


def _check_likely(likely: int) -> None:
    if likely > MOST_LIKELY:
        raise BadMessage(f"likely must be at most {MOST_LIKELY}, got {likely}")


def _encode_pass(request: Pass) -> pb.Pass:
    if request.wanted == ():
        raise ValueError("a pass must want something: wanted is None for everything, or has at least the root")
    tree = request.tree
    return pb.Pass(
        number=request.number,
        committed=request.committed,
        tree=pb.TokenTree(tokens=tree.tokens, parents=None if tree.is_chain else [at + 1 for at in tree.parents]),
        listed=len(request.listed),
        wanted=request.wanted,
        draws=request.draws,
        run=request.run if request.run > 1 else 0,
    )


def _decode_pass(message: pb.Pass, listed: Sequence[Ids], vocabulary_size: int | None) -> Pass:
    tree = _decode_tree(message.tree, vocabulary_size)
    check_max(len(message.wanted), 1 + len(tree), "wanted")
    wanted = tuple(message.wanted) or None
    if wanted is not None and (max(wanted) > len(tree) or list(wanted) != sorted(set(wanted))):
        raise BadMessage(f"wanted must be ascending, from 0 (the root) to {len(tree)} (the last node), got {wanted}")
    answered = 1 + len(tree) if wanted is None else len(wanted)
    if len(listed) not in (0, answered):
        raise BadMessage(f"listed has {len(listed)} lists; it needs none or {answered}, one a row answered")
    check_max(message.run, MOST_RUN, "run")
    if message.run > 1 and (message.tree.tokens or not message.draws):
        raise BadMessage("a run of several tokens needs draws, and has no tree")
    return Pass(
        number=message.number,
        committed=codec.decode_id_tuple(message.committed, "committed", vocabulary_size),
        tree=tree,
        listed=tuple(listed),
        wanted=wanted,
        draws=message.draws,
        run=max(1, message.run),
    )


def _decode_tree(message: pb.TokenTree, vocabulary_size: int | None) -> TokenTree:
    tokens = codec.decode_id_tuple(message.tokens, "tree.tokens", vocabulary_size, MAX_NODES)
    check_max(len(message.parents), len(tokens), "tree.parents")
    parents = tuple(parent - 1 for parent in message.parents) or tuple(range(ROOT, ROOT + len(tokens)))
    try:
        return TokenTree(tokens, parents)
    except ValueError as error:
        raise BadMessage(f"tree: {error}") from error


def _decode_fetch(message: pb.FetchRow, vocabulary_size: int | None) -> FetchRow:
    listed = None
    if message.HasField("listed"):
        listed = codec.decode_ids(message.listed, "listed", vocabulary_size)
    return FetchRow(message.number, message.node, listed)


def _encode_done(reply: PassDone, rows: list[Row], samples: list[Sample]) -> pb.PassDone:
    """Adds its answers to those of the frame, all rows or all samples; raises ValueError if they are not."""
    before = len(rows), len(samples)
    for node in reply.nodes:
        if isinstance(node, Row):
            rows.append(node)
        else:
            samples.append(node)
    own = len(rows) - before[0], len(samples) - before[1]
    if bool(own[0]) == bool(own[1]):
        raise ValueError(f"a pass needs rows or samples as its answers, not {own[0]} and {own[1]}")
    return pb.PassDone(
        number=reply.number,
        rows=own[0],
        samples=own[1],
        microseconds=codec.encode_seconds(reply.seconds),
        queued_microseconds=codec.encode_seconds(reply.queued),
        more=reply.more,
        forwards=reply.forwards if reply.forwards > 1 else 0,
        shared=reply.shared if reply.shared > 1 else 0,
        fed=reply.fed,
        first=reply.first,
    )


def _decode_done(message: pb.PassDone, nodes: tuple[Row | Sample, ...]) -> PassDone:
    if bool(message.rows) == bool(message.samples):
        raise BadMessage("done needs rows or samples, one answer at least")
    seconds, queued = map(codec.decode_seconds, (message.microseconds, message.queued_microseconds))
    forwards, shared = max(1, message.forwards), max(1, message.shared)
    more, fed, first = message.more, message.fed, message.first
    return PassDone(message.number, nodes, seconds, queued, more, forwards, shared, fed, first)


def _encode_scored(reply: PromptScored) -> pb.PromptScored:
    microseconds = codec.encode_seconds(reply.seconds)
    return pb.PromptScored(first=reply.first, samples=len(reply.tokens), microseconds=microseconds, more=reply.more)


def _decode_scored(message: pb.PromptScored, tokens: Sequence[Row | Sample]) -> PromptScored:
    scored = tuple(token for token in tokens if isinstance(token, Sample))
    return PromptScored(message.first, scored, codec.decode_seconds(message.microseconds), message.more)


def _encode_fetched(reply: RowFetched) -> pb.RowFetched:
    if reply.row.whole:
        return pb.RowFetched(number=reply.number, node=reply.node, whole=codec.encode_whole(reply.row))
    return pb.RowFetched(number=reply.number, node=reply.node, head=codec.encode_rows([reply.row]))


def _decode_fetched(message: pb.RowFetched, vocabulary_size: int | None) -> RowFetched:
    match message.WhichOneof("row"):
        case "whole":
            row = codec.decode_whole(message.whole, "whole", vocabulary_size)
        case "head":
            rows = codec.decode_rows(message.head, "head", vocabulary_size)
            if len(rows) != 1:
                raise BadMessage(f"head has {len(rows)} rows; it needs one")
            (row,) = rows
        case _:
            raise BadMessage("fetched needs a head or a whole row")
    return RowFetched(message.number, message.node, row)
