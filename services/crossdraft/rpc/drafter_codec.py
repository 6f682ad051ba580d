"""Frames of a drafter's link: protobuf messages to plain values and back."""

from collections.abc import Iterator, Sequence
from typing import assert_never

import numpy as np

from crossdraft.rpc import codec
from crossdraft.rpc.codec import check_max
from crossdraft.rpc.errors import BadMessage
from crossdraft.rpc.frames import BeginSession, EndSession, RoleCodec, SessionEnded, Shares, check_frame
from crossdraft.text.letters import NOTHING
from crossdraft.types.messages import (
    MOST_DRAFT_TOKENS,
    Advance,
    Branch,
    Draft,
    Drafted,
    OpenDrafter,
    Opened,
    Score,
    Scored,
)
from crossdraft.types.rows import DraftToken, Row, Whose
from crossdraft.types.trees import MOST_NODES
from crossdraft.v1 import common_pb2
from crossdraft.v1 import drafter_pb2 as pb

Request = BeginSession[OpenDrafter] | Draft | Advance | Score | EndSession
Reply = Opened | Drafted | Scored | SessionEnded
MAX_ROW_WIDTH = 1 << 16  # ids
MAX_STRINGS = 4096  # of one request for scores
MAX_STRING = 1 << 16  # letters of each of them
MAX_BRANCHES = MOST_DRAFT_TOKENS * MOST_DRAFT_TOKENS  # of a frame: as many as one reply may have


def encode_requests(messages: Sequence[tuple[int, Request]]) -> bytes:
    frame = pb.DraftRequests()
    for session, request in messages:
        match request:
            case Advance():
                advance = pb.Advance(epoch=request.epoch, count=request.count)
                frame.requests.add(session=session, advance=advance)
            case Draft():
                draft = pb.Draft(**vars(request) | {"letters": request.letters.encode()})
                frame.requests.add(session=session, draft=draft)
            case Score():
                strings = [letters.encode() for letters in request.strings]
                frame.requests.add(session=session, score=pb.Score(**vars(request) | {"strings": strings}))
            case BeginSession():
                opening = _encode_open(request.opening)
                frame.requests.add(session=session, open=opening, request_id=request.request_id)
            case EndSession():
                frame.requests.add(session=session, close=common_pb2.CloseSession())
            case _:
                assert_never(request)
    return frame.SerializeToString()


def decode_requests(raw: bytes, vocabulary_size: int | None) -> Iterator[tuple[int, Request | BadMessage]]:
    """The messages of a frame to a drafter; raises BadMessage or DecodeError."""
    frame = pb.DraftRequests.FromString(raw)
    check_frame(raw, frame.requests)
    for message in frame.requests:
        try:
            yield message.session, _decode_request(message, vocabulary_size)
        except BadMessage as error:
            yield message.session, error


def _decode_request(message: pb.DraftRequest, vocabulary_size: int | None) -> Request:
    match message.WhichOneof("message"):
        case "draft":
            return _decode_draft(message.draft)
        case "advance":
            # No upper limit: an epoch in which everything is accepted may be long. What is limited is each advance.
            return Advance(message.advance.epoch, message.advance.count)
        case "score":
            return _decode_score(message.score)
        case "open":
            return BeginSession(_decode_open(message.open, vocabulary_size), message.request_id)
        case "close":
            return EndSession()
        case _:
            raise BadMessage("a DraftRequest must be one of open, draft, advance, score and close")


def encode_replies(messages: Sequence[tuple[int, Reply]]) -> bytes:
    """A frame from a drafter; raises ValueError if only some of the draft tokens of a reply have rows, or if the
    branches are too many for one frame."""
    branches = sum(len(reply.branches) for _, reply in messages if isinstance(reply, Drafted))
    if branches > MAX_BRANCHES:
        raise ValueError(f"{branches} branches; at most {MAX_BRANCHES} are possible")
    frame, rows = pb.DraftReplies(), list[Row]()
    for session, reply in messages:
        match reply:
            case Drafted():
                frame.replies.add(session=session, drafted=_encode_drafted(reply, rows))
            case Scored():
                scored = pb.Scored(
                    epoch=reply.epoch,
                    probabilities=reply.probabilities.tolist(),
                    microseconds=codec.encode_seconds(reply.seconds),
                )
                frame.replies.add(session=session, scored=scored)
            case Opened():
                frame.replies.add(session=session, opened=common_pb2.Opened(fingerprint=reply.fingerprint))
            case SessionEnded():
                frame.replies.add(session=session, ended=common_pb2.SessionEnded(**vars(reply)))
            case _:
                assert_never(reply)
    if rows:
        frame.rows.CopyFrom(codec.encode_rows(rows))
    return frame.SerializeToString()


def decode_replies(raw: bytes, vocabulary_size: int | None) -> Iterator[tuple[int, Reply | BadMessage]]:
    """The messages of a frame from a drafter; raises BadMessage or DecodeError.

    The known vocabulary is the drafter's own; the target's ids are checked by the session, which knows that one.
    """
    frame = pb.DraftReplies.FromString(raw)
    check_frame(raw, frame.replies)
    check_max(sum(len(message.drafted.branches) for message in frame.replies), MAX_BRANCHES, "the frame's branches")
    with_rows = sum(len(message.drafted.tokens) for message in frame.replies if message.drafted.with_rows)
    check_max(with_rows, codec.MAX_LISTS, "the frame's tokens with rows")
    drawn = [token for message in frame.replies if message.drafted.with_rows for token in message.drafted.tokens]
    rows = Shares(codec.decode_rows(frame.rows, "rows", None, drawn), "rows")
    for message in frame.replies:
        drafted = message.drafted
        share = rows.take(len(drafted.tokens)) if drafted.with_rows else ()
        try:
            yield message.session, _decode_reply(message, share, None if drafted.target_ids else vocabulary_size)
        except BadMessage as error:
            yield message.session, error
    rows.check()


def _decode_reply(message: pb.DraftReply, rows: Sequence[Row], vocabulary_size: int | None) -> Reply:
    match message.WhichOneof("message"):
        case "drafted":
            return _decode_drafted(message.drafted, rows, vocabulary_size)
        case "scored":
            return _decode_scored(message.scored)
        case "opened":
            return Opened(message.opened.fingerprint)
        case "ended":
            return SessionEnded(message.ended.code, message.ended.text)
        case _:
            raise BadMessage("a DraftReply must be one of opened, drafted, scored and ended")


ROLE: RoleCodec[OpenDrafter, Draft | Advance | Score, Drafted | Scored] = RoleCodec(
    name="drafter",
    other="target",
    service="crossdraft.v1.Drafter",
    stream="Draft",
    encode_requests=encode_requests,
    decode_requests=decode_requests,
    encode_replies=encode_replies,
    decode_replies=decode_replies,
)


def _encode_open(request: OpenDrafter) -> pb.OpenDrafter:
    changed = {
        "prompt": request.prompt.encode(),
        "options": codec.encode_options(request.options),
        "noise": codec.encode_noise(request.noise),
        "allowed": codec.encode_ids(request.allowed),
    }
    return pb.OpenDrafter(**vars(request) | changed)


def _decode_open(message: pb.OpenDrafter, vocabulary_size: int | None) -> OpenDrafter:
    allowed = codec.decode_ids(message.allowed, "allowed", vocabulary_size) if message.HasField("allowed") else None
    if message.audited and not message.HasField("noise"):
        raise BadMessage("audited needs noise: without it no draw can be recomputed")
    check_max(message.row_width, MAX_ROW_WIDTH, "row_width")
    changed = {
        "prompt": codec.decode_letters(message.prompt, "prompt"),
        "options": codec.decode_options(message.options, vocabulary_size),
        "noise": codec.decode_noise(message),
        "allowed": allowed,
    }
    return OpenDrafter(**codec.plain_fields(message) | changed)


def _decode_draft(message: pb.Draft) -> Draft:
    _check_draft_tokens(message.count, "count", "how many draft tokens are wanted")
    chunk = message.chunk if message.HasField("chunk") else MOST_DRAFT_TOKENS
    _check_draft_tokens(chunk, "chunk", "how many draft tokens one reply has")
    width = message.branch_width if message.HasField("branch_width") else 1
    _check_draft_tokens(width, "branch_width", "how many branches each draft token has; for none, branch_depth is 0")
    most = {"branch_depth": MOST_DRAFT_TOKENS, "first": MOST_DRAFT_TOKENS, "tree_nodes": MOST_NODES}
    for name, limit in most.items():
        if getattr(message, name) > limit:
            raise BadMessage(f"{name} must be at most {limit}, got {getattr(message, name)}")
    if not 0 <= message.least_likely <= 1:  # false for NaN as well
        raise BadMessage(f"least_likely must be between 0 and 1, got {message.least_likely}")
    letters, depth, nodes = codec.decode_letters(message.letters, "letters"), message.branch_depth, message.tree_nodes
    shape = chunk, depth, width, message.adopt, message.first, nodes, message.least_likely
    return Draft(message.epoch, message.offset, letters, message.count, *shape)


def _decode_score(message: pb.Score) -> Score:
    _check_draft_tokens(message.tokens, "tokens", "how many draft tokens' text counts")
    check_max(len(message.strings), MAX_STRINGS, "strings")
    strings = tuple(codec.decode_letters(raw, f"strings[{place}]") for place, raw in enumerate(message.strings))
    check_max(max(map(len, strings), default=0), MAX_STRING, "the longest of strings")
    if not all(strings):
        raise BadMessage(f"strings[{strings.index(NOTHING)}] is empty; every text begins with nothing")
    return Score(message.epoch, message.offset, strings, message.tokens)


def _check_draft_tokens(count: int, name: str, meaning: str) -> None:
    """Raises BadMessage unless a draft may have so many: its time and its answer grow with them."""
    if not 1 <= count <= MOST_DRAFT_TOKENS:
        raise BadMessage(f"{name} must be between 1 and {MOST_DRAFT_TOKENS}, got {count}: {meaning}")


def _decode_scored(message: pb.Scored) -> Scored:
    check_max(len(message.probabilities), MAX_STRINGS, "probabilities")
    probabilities = np.array(message.probabilities, dtype=np.float64)
    if not bool(np.all((probabilities >= 0) & (probabilities <= 1))):  # false for NaN as well
        raise BadMessage("probabilities has one that is not between 0 and 1")
    return Scored(message.epoch, probabilities, codec.decode_seconds(message.microseconds))


def _encode_drafted(reply: Drafted, frame_rows: list[Row]) -> pb.Drafted:
    """Adds its rows to those of the frame; raises ValueError unless all draft tokens have rows, or none, and ids of one
    vocabulary."""
    rows = [draft_token.row for draft_token in reply.draft_tokens if draft_token.row is not None]
    kinds = {draft_token.whose for draft_token in reply.draft_tokens}
    if len(rows) not in (0, len(reply.draft_tokens)) or len(kinds) > 1:
        raise ValueError("the draft tokens of a reply must all have rows or none, and use the same ids")
    frame_rows += rows
    return pb.Drafted(
        epoch=reply.epoch,
        tokens=[draft_token.token for draft_token in reply.draft_tokens],
        target_ids=Whose.TARGET in kinds,
        with_rows=bool(rows),
        microseconds=codec.encode_seconds(reply.seconds),
        reason=reply.reason,
        first=reply.first,
        branches=[pb.Branch(**vars(one) | {"letters": one.letters.encode()}) for one in reply.branches],
        queued_microseconds=codec.encode_seconds(reply.queued),
    )


def _decode_drafted(message: pb.Drafted, rows: Sequence[Row], size: int | None) -> Drafted:
    return Drafted(
        epoch=message.epoch,
        draft_tokens=_decode_draft_tokens(message, rows, size),
        seconds=codec.decode_seconds(message.microseconds),
        reason=message.reason,
        first=message.first,
        branches=tuple(_decode_branch(one, f"branches[{place}]", size) for place, one in enumerate(message.branches)),
        queued=codec.decode_seconds(message.queued_microseconds),
    )


def _decode_draft_tokens(message: pb.Drafted, rows: Sequence[Row], size: int | None) -> tuple[DraftToken, ...]:
    tokens = codec.decode_id_tuple(message.tokens, "tokens", size, MOST_DRAFT_TOKENS)
    whose = Whose.TARGET if message.target_ids else Whose.DRAFTER
    if not message.with_rows:
        return tuple(DraftToken(token, None, whose) for token in tokens)
    if rows:
        codec.checked(np.concatenate([row.ids for row in rows]), "rows", size)
    return tuple(DraftToken(token, row, whose) for token, row in zip(tokens, rows, strict=True))


def _decode_branch(message: pb.Branch, name: str, vocabulary_size: int | None) -> Branch:
    if not message.number:
        raise BadMessage(f"{name}.number must be at least 1; 0 is none")
    letters = codec.decode_letters(message.letters, f"{name}.letters")
    if not letters:
        raise BadMessage(f"{name}.letters is empty; something must replace what is refused")
    tokens = codec.decode_id_tuple(message.tokens, f"{name}.tokens", vocabulary_size, MOST_DRAFT_TOKENS)
    return Branch(message.number, message.offset, letters, tokens)
