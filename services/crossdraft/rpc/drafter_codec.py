"""Protobuf messages to plain values and back: those to a drafter and from it."""

import numpy as np

from crossdraft.rpc import codec
from crossdraft.rpc.codec import check_max
from crossdraft.rpc.errors import BadMessage
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
from crossdraft.types.rows import DraftToken, Whose
from crossdraft.v1 import common_pb2
from crossdraft.v1 import drafter_pb2 as pb

Request = OpenDrafter | Draft | Advance | Score
Reply = Opened | Drafted | Scored
MAX_ROW_WIDTH = 1 << 16  # ids
MAX_STRINGS = 4096  # of one request for scores
MAX_STRING = 1 << 16  # letters of each of them
MAX_BRANCHES = MOST_DRAFT_TOKENS * MOST_DRAFT_TOKENS  # in one reply


def encode_request(request: Request) -> pb.DraftRequest:
    """One message to a drafter."""
    match request:
        case OpenDrafter():
            return pb.DraftRequest(open=_encode_open(request))
        case Draft():
            return pb.DraftRequest(draft=pb.Draft(**vars(request) | {"letters": codec.encode_letters(request.letters)}))
        case Advance():
            return pb.DraftRequest(advance=pb.Advance(**vars(request)))
        case Score():
            strings = list(map(codec.encode_letters, request.strings))
            return pb.DraftRequest(score=pb.Score(**vars(request) | {"strings": strings}))


def decode_request(message: pb.DraftRequest, vocabulary_size: int | None) -> Request:
    """One message to a drafter; raises BadMessage."""
    match message.WhichOneof("message"):
        case "open":
            return _decode_open(message.open, vocabulary_size)
        case "draft":
            return _decode_draft(message.draft)
        case "advance":
            return _decode_advance(message.advance)
        case "score":
            return _decode_score(message.score)
        case _:
            raise BadMessage("a DraftRequest must be one of open, draft, advance and score")


def encode_reply(reply: Reply) -> pb.DraftReply:
    """One message from a drafter."""
    match reply:
        case Opened():
            return pb.DraftReply(opened=common_pb2.Opened(**vars(reply)))
        case Drafted():
            return pb.DraftReply(drafted=_encode_drafted(reply))
        case Scored():
            scored = pb.Scored(
                epoch=reply.epoch,
                probabilities=reply.probabilities.tolist(),
                microseconds=codec.encode_seconds(reply.seconds),
            )
            return pb.DraftReply(scored=scored)


def decode_reply(message: pb.DraftReply, vocabulary_size: int | None) -> Reply:
    """One message from a drafter; raises BadMessage."""
    match message.WhichOneof("message"):
        case "opened":
            return Opened(message.opened.fingerprint)
        case "drafted":
            return _decode_drafted(message.drafted, vocabulary_size)
        case "scored":
            return _decode_scored(message.scored)
        case _:
            raise BadMessage("a DraftReply must be one of opened, drafted and scored")


def _encode_open(request: OpenDrafter) -> pb.OpenDrafter:
    changed = {
        "prompt": codec.encode_letters(request.prompt),
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
    return OpenDrafter(
        prompt=codec.decode_letters(message.prompt, "prompt"),
        options=codec.decode_options(message.options, vocabulary_size),
        noise=codec.decode_noise(message.noise) if message.HasField("noise") else None,
        row_width=message.row_width,
        allowed=allowed,
        redistribute=message.redistribute,
        audited=message.audited,
        templated=message.templated,
    )


def _decode_draft(message: pb.Draft) -> Draft:
    _check_draft_tokens(message.count, "count", "how many draft tokens are wanted")
    chunk = message.chunk if message.HasField("chunk") else MOST_DRAFT_TOKENS
    _check_draft_tokens(chunk, "chunk", "how many draft tokens one reply has")
    width = message.branch_width if message.HasField("branch_width") else 1
    _check_draft_tokens(width, "branch_width", "how many branches each draft token has; for none, branch_depth is 0")
    for name, value in (("branch_depth", message.branch_depth), ("first", message.first)):
        if value > MOST_DRAFT_TOKENS:
            raise BadMessage(f"{name} must be at most {MOST_DRAFT_TOKENS}, got {value}")
    offset, letters, depth = message.offset, codec.decode_letters(message.letters, "letters"), message.branch_depth
    return Draft(
        message.epoch, offset, letters, message.count, chunk, depth, width, adopt=message.adopt, first=message.first
    )


def _decode_advance(message: pb.Advance) -> Advance:
    # No upper limit: an epoch in which everything is accepted may be long. What is limited is each advance.
    if not message.count:
        raise BadMessage("count must be at least 1: how many draft tokens of the epoch are wanted")
    return Advance(message.epoch, message.count)


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
    probabilities = np.array(message.probabilities, dtype=np.float64)
    if not bool(np.all((probabilities >= 0) & (probabilities <= 1))):  # false for NaN as well
        raise BadMessage("probabilities has one that is not between 0 and 1")
    return Scored(message.epoch, probabilities, codec.decode_seconds(message.microseconds))


def _encode_drafted(reply: Drafted) -> pb.Drafted:
    """The draft tokens of a reply use the same ids, and all have rows or none has; raises ValueError if not."""
    rows = [draft_token.row for draft_token in reply.draft_tokens if draft_token.row is not None]
    kinds = {draft_token.whose for draft_token in reply.draft_tokens}
    if len(rows) not in (0, len(reply.draft_tokens)) or len(kinds) > 1:
        raise ValueError("the draft tokens of a reply must all have rows or none, and use the same ids")
    return pb.Drafted(
        epoch=reply.epoch,
        tokens=[draft_token.token for draft_token in reply.draft_tokens],
        target_ids=Whose.TARGET in kinds,
        rows=codec.encode_rows(rows) if rows else None,
        microseconds=codec.encode_seconds(reply.seconds),
        reason=reply.reason,
        first=reply.first,
        branches=[pb.Branch(**vars(one) | {"letters": codec.encode_letters(one.letters)}) for one in reply.branches],
        queued_microseconds=codec.encode_seconds(reply.queued),
    )


def _decode_drafted(message: pb.Drafted, vocabulary_size: int | None) -> Drafted:
    # The known vocabulary is the drafter's own; the target's ids are checked by the session, which knows that one.
    size = None if message.target_ids else vocabulary_size
    check_max(len(message.branches), MAX_BRANCHES, "branches")
    return Drafted(
        epoch=message.epoch,
        draft_tokens=_decode_draft_tokens(message, size),
        seconds=codec.decode_seconds(message.microseconds),
        reason=message.reason,
        first=message.first,
        branches=tuple(_decode_branch(one, f"branches[{place}]", size) for place, one in enumerate(message.branches)),
        queued=codec.decode_seconds(message.queued_microseconds),
    )


def _decode_draft_tokens(message: pb.Drafted, size: int | None) -> tuple[DraftToken, ...]:
    tokens = codec.decode_id_tuple(message.tokens, "tokens", size)
    if len(tokens) > MOST_DRAFT_TOKENS:
        raise BadMessage(f"tokens has {len(tokens)}; one reply has at most {MOST_DRAFT_TOKENS}")
    whose = Whose.TARGET if message.target_ids else Whose.DRAFTER
    if not message.HasField("rows"):
        return tuple(DraftToken(token, None, whose) for token in tokens)
    rows = codec.decode_rows(message.rows, "rows", size)
    if len(rows) != len(tokens):
        raise BadMessage(f"rows has {len(rows)} for {len(tokens)} tokens")
    for token, row in zip(tokens, rows, strict=True):
        if (row.whole and not row.probability(token)) or not row.lists((token,)):
            raise BadMessage(f"tokens has {token}, which its own row cannot give")
    return tuple(DraftToken(token, row, whose) for token, row in zip(tokens, rows, strict=True))


def _decode_branch(message: pb.Branch, name: str, vocabulary_size: int | None) -> Branch:
    if not message.number:
        raise BadMessage(f"{name}.number must be at least 1; 0 is none")
    letters = codec.decode_letters(message.letters, f"{name}.letters")
    if not letters:
        raise BadMessage(f"{name}.letters is empty; something must replace what is refused")
    _check_draft_tokens(len(message.tokens), f"{name}.tokens", "how many tokens it has")
    tokens = codec.decode_id_tuple(message.tokens, f"{name}.tokens", vocabulary_size)
    return Branch(message.number, message.offset, letters, tokens)
