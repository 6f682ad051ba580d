"""The messages of target and drafter: protobuf to plain values and back, and the frames of their links.

Each function that writes puts rows, samples and lists of ids into the frame's columns, and each one that reads is given
its share of them; what is wrong with a message raises BadMessage, with a text that names the field.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np

from crossdraft.rpc import codec
from crossdraft.rpc.codec import check_max
from crossdraft.rpc.errors import BadMessage
from crossdraft.rpc.frames import OPEN, Direction, EndSession, Kind, RoleCodec, SessionEnded, Shares, Written
from crossdraft.text.letters import NOTHING
from crossdraft.types.messages import (
    MAX_RUN,
    MOST_DRAFT_TOKENS,
    MOST_LIKELY,
    Advance,
    Branch,
    Draft,
    Drafted,
    FetchRow,
    OpenDrafter,
    Opened,
    OpenTarget,
    Pass,
    PassDone,
    PromptScored,
    RowFetched,
    RunTo,
    Sample,
    Score,
    Scored,
    ScorePrompt,
)
from crossdraft.types.rows import DraftToken, Ids, Row, Whose
from crossdraft.types.trees import MOST_NODES, TokenTree
from crossdraft.v1 import common_pb2 as common
from crossdraft.v1 import drafter_pb2 as drafter_pb
from crossdraft.v1 import target_pb2 as target_pb

DEFAULT_HEAD = 64  # ids of a row that travel when the client does not say how many
MAX_HEAD = 4096
MAX_NODES = 17 * MOST_DRAFT_TOKENS  # of a pass's tree: sixteen paths, and some
MAX_ROW_WIDTH = 1 << 16  # ids
MAX_STRINGS = 4096  # of one request for scores
MAX_STRING = 1 << 16  # letters of each of them
MAX_BRANCHES = MOST_DRAFT_TOKENS * MOST_DRAFT_TOKENS  # of a frame: as many as one reply may have


# Requests to a target.


def _write_open_target(request: OpenTarget, written: Written) -> target_pb.OpenTarget:
    return target_pb.OpenTarget(**_opening(request))


def _opening(request: OpenTarget | OpenDrafter) -> dict[str, Any]:
    """The fields that both have; the frame has the id of the request."""
    given = vars(request) | {
        "options": codec.encode_options(request.options),
        "noise": codec.encode_noise(request.noise),
    }
    del given["request_id"]
    return given


def _read_open_target(message: target_pb.OpenTarget, share: object, size: int | None) -> OpenTarget:
    if not message.prompt:
        raise BadMessage("prompt is empty; a target needs at least one id, for instance its begin of sequence")
    check_max(message.head, MAX_HEAD, "head")
    _check_likely(message.likely)
    return OpenTarget(
        prompt=codec.decode_id_tuple(message.prompt, "prompt", size),
        options=codec.decode_options(message.options, size),
        noise=codec.decode_noise(message),
        head=message.head if message.HasField("head") else DEFAULT_HEAD,
        likely=message.likely if message.HasField("likely") else None,
        ignore_stops=message.ignore_stops,
        stop_ids=codec.decode_id_tuple(message.stop_ids, "stop_ids", size, codec.MAX_STOPS),
        hidden=message.hidden,
    )


def _check_likely(likely: int) -> None:
    if likely > MOST_LIKELY:
        raise BadMessage(f"likely must be at most {MOST_LIKELY}, got {likely}")


def _write_pass(request: Pass, written: Written) -> target_pb.Pass:
    if request.wanted == ():
        raise ValueError("a pass must want something: wanted is None for everything, or has at least the root")
    written.listed += request.listed
    tree = request.tree
    return target_pb.Pass(
        number=request.number,
        committed=request.committed,
        tree=target_pb.TokenTree(
            tokens=tree.tokens, parents=None if tree.is_chain else [at + 1 for at in tree.parents]
        ),
        listed=len(request.listed),
        wanted=request.wanted,
        draws=request.draws,
        run=request.run if request.run > 1 else 0,
    )


def _read_pass(message: target_pb.Pass, listed: Sequence[Ids], size: int | None) -> Pass:
    tree = _read_tree(message.tree, size)
    check_max(len(message.wanted), 1 + len(tree), "wanted")
    wanted = tuple(message.wanted) or None
    if wanted is not None and (max(wanted) > len(tree) or list(wanted) != sorted(set(wanted))):
        raise BadMessage(f"wanted must be ascending, from 0 (the root) to {len(tree)} (the last node), got {wanted}")
    answered = 1 + len(tree) if wanted is None else len(wanted)
    if len(listed) not in (0, answered):
        raise BadMessage(f"listed has {len(listed)} lists; it needs none or {answered}, one a row answered")
    check_max(message.run, MAX_RUN, "run")
    if message.run > 1 and (message.tree.tokens or not message.draws):
        raise BadMessage("a run of several tokens needs draws, and has no tree")
    committed = codec.decode_id_tuple(message.committed, "committed", size)
    return Pass(message.number, committed, tree, tuple(listed), wanted, message.draws, max(1, message.run))


def _read_tree(message: target_pb.TokenTree, size: int | None) -> TokenTree:
    tokens = codec.decode_id_tuple(message.tokens, "tree.tokens", size, MAX_NODES)
    check_max(len(message.parents), len(tokens), "tree.parents")
    try:
        if not message.parents:
            return TokenTree.chain(tokens)
        return TokenTree(tokens, tuple(parent - 1 for parent in message.parents))
    except ValueError as error:
        raise BadMessage(f"tree: {error}") from error


def _write_fetch(request: FetchRow, written: Written) -> target_pb.FetchRow:
    return target_pb.FetchRow(**vars(request) | {"listed": codec.encode_ids(request.listed)})


def _read_fetch(message: target_pb.FetchRow, share: object, size: int | None) -> FetchRow:
    listed = codec.decode_ids(message.listed, "listed", size) if message.HasField("listed") else None
    return FetchRow(message.number, message.node, listed)


def _read_prompt_request(message: target_pb.ScorePrompt, share: object, size: int | None) -> ScorePrompt:
    _check_likely(message.likely)
    return ScorePrompt(message.first, message.likely)


# Replies of a target.


def _write_done(reply: PassDone, written: Written) -> target_pb.PassDone:
    """Raises ValueError unless its answers are all rows or all samples."""
    kinds, count = {*map(type, reply.nodes)}, len(reply.nodes)
    if kinds not in ({Row}, {Sample}):
        rows = sum(isinstance(node, Row) for node in reply.nodes)
        raise ValueError(f"a pass needs rows or samples as its answers, not {rows} and {count - rows}")
    of_rows = kinds == {Row}
    (written.rows if of_rows else written.samples).extend(reply.nodes)  # type: ignore[arg-type]  # by their kind
    return target_pb.PassDone(
        number=reply.number,
        rows=count if of_rows else 0,
        samples=0 if of_rows else count,
        microseconds=codec.encode_seconds(reply.seconds),
        queued_microseconds=codec.encode_seconds(reply.queued),
        more=reply.more,
        forwards=reply.forwards if reply.forwards > 1 else 0,
        shared=reply.shared if reply.shared > 1 else 0,
        fed=reply.fed,
        first=reply.first,
        hidden=codec.encode_hidden(reply.hidden),
    )


def _share_of_done(message: target_pb.PassDone, columns: Sequence[Shares[Any]]) -> Sequence[Row | Sample]:
    rows, samples = columns
    return *rows.take(message.rows), *samples.take(message.samples)


def _read_done(message: target_pb.PassDone, nodes: Sequence[Row | Sample], size: int | None) -> PassDone:
    if bool(message.rows) == bool(message.samples):
        raise BadMessage("done needs rows or samples, one answer at least")
    seconds, queued = map(codec.decode_seconds, (message.microseconds, message.queued_microseconds))
    forwards, shared = max(1, message.forwards), max(1, message.shared)
    more, fed, first, hidden = message.more, message.fed, message.first, codec.decode_hidden(message)
    return PassDone(message.number, tuple(nodes), seconds, queued, more, forwards, shared, fed, first, hidden)


def _write_fetched(reply: RowFetched, written: Written) -> target_pb.RowFetched:
    if reply.row.whole:
        return target_pb.RowFetched(number=reply.number, node=reply.node, whole=codec.encode_whole(reply.row))
    return target_pb.RowFetched(number=reply.number, node=reply.node, head=codec.encode_rows([reply.row]))


def _read_fetched(message: target_pb.RowFetched, share: object, size: int | None) -> RowFetched:
    match message.WhichOneof("row"):
        case "whole":
            row = codec.decode_whole(message.whole, "whole", size)
        case "head":
            rows = codec.decode_rows(message.head, "head", size)
            if len(rows) != 1:
                raise BadMessage(f"head has {len(rows)} rows; it needs one")
            (row,) = rows
        case _:
            raise BadMessage("fetched needs a head or a whole row")
    return RowFetched(message.number, message.node, row)


def _write_prompt(reply: PromptScored, written: Written) -> target_pb.PromptScored:
    written.samples += reply.tokens
    microseconds = codec.encode_seconds(reply.seconds)
    return target_pb.PromptScored(
        first=reply.first, samples=len(reply.tokens), microseconds=microseconds, more=reply.more
    )


def _share_of_prompt(message: target_pb.PromptScored, columns: Sequence[Shares[Any]]) -> Sequence[Sample]:
    return columns[1].take(message.samples)


def _read_prompt(message: target_pb.PromptScored, tokens: Sequence[Sample], size: int | None) -> PromptScored:
    return PromptScored(message.first, tuple(tokens), codec.decode_seconds(message.microseconds), message.more)


def _target_columns(frame: target_pb.VerifyReplies, size: int | None) -> Sequence[Shares[Any]]:
    rows = codec.decode_rows(frame.rows, "rows", size)
    return Shares(rows, "rows"), Shares(codec.decode_samples(frame.samples, size), "samples")


# Requests to a drafter.


def _write_open_drafter(request: OpenDrafter, written: Written) -> drafter_pb.OpenDrafter:
    changed = {"prompt": request.prompt.encode(), "allowed": codec.encode_ids(request.allowed)}
    return drafter_pb.OpenDrafter(**_opening(request) | changed)


def _read_open_drafter(message: drafter_pb.OpenDrafter, share: object, size: int | None) -> OpenDrafter:
    if message.audited and not message.HasField("noise"):
        raise BadMessage("audited needs noise: without it no draw can be recomputed")
    check_max(message.row_width, MAX_ROW_WIDTH, "row_width")
    changed = {
        "prompt": codec.decode_letters(message.prompt, "prompt"),
        "options": codec.decode_options(message.options, size),
        "noise": codec.decode_noise(message),
        "allowed": codec.decode_ids(message.allowed, "allowed", size) if message.HasField("allowed") else None,
    }
    return OpenDrafter(**codec.plain_fields(message) | changed)


def _write_draft(request: Draft, written: Written) -> drafter_pb.Draft:
    hidden = codec.encode_hidden(request.hidden)
    return drafter_pb.Draft(**vars(request) | {"letters": request.letters.encode(), "hidden": hidden})


def _read_draft(message: drafter_pb.Draft, share: object, size: int | None) -> Draft:
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
    hidden = codec.decode_hidden(message)
    shape = chunk, depth, width, message.adopt, message.first, nodes, message.least_likely, hidden
    return Draft(message.epoch, message.offset, letters, message.count, *shape)


def _write_score(request: Score, written: Written) -> drafter_pb.Score:
    return drafter_pb.Score(**vars(request) | {"strings": [letters.encode() for letters in request.strings]})


def _read_score(message: drafter_pb.Score, share: object, size: int | None) -> Score:
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


# Replies of a drafter.


def _write_drafted(reply: Drafted, written: Written) -> drafter_pb.Drafted:
    """Raises ValueError unless all draft tokens have rows, or none, and ids of one vocabulary; or if the branches are
    too many for one frame."""
    rows = [draft_token.row for draft_token in reply.draft_tokens if draft_token.row is not None]
    kinds = {draft_token.whose for draft_token in reply.draft_tokens}
    if len(rows) not in (0, len(reply.draft_tokens)) or len(kinds) > 1:
        raise ValueError("the draft tokens of a reply must all have rows or none, and use the same ids")
    written.rows += rows
    written.branches += len(reply.branches)
    if written.branches > MAX_BRANCHES:
        raise ValueError(f"{written.branches} branches; at most {MAX_BRANCHES} are possible")
    return drafter_pb.Drafted(
        epoch=reply.epoch,
        tokens=[draft_token.token for draft_token in reply.draft_tokens],
        target_ids=Whose.TARGET in kinds,
        with_rows=bool(rows),
        microseconds=codec.encode_seconds(reply.seconds),
        reason=reply.reason,
        first=reply.first,
        branches=[drafter_pb.Branch(**vars(one) | {"letters": one.letters.encode()}) for one in reply.branches],
        queued_microseconds=codec.encode_seconds(reply.queued),
    )


def _share_of_drafted(message: drafter_pb.Drafted, columns: Sequence[Shares[Any]]) -> Sequence[Row]:
    return columns[0].take(len(message.tokens)) if message.with_rows else ()


def _read_drafted(message: drafter_pb.Drafted, rows: Sequence[Row], size: int | None) -> Drafted:
    """The known vocabulary is the drafter's own; the target's ids are checked by the session, which knows that one."""
    size, whose = (None, Whose.TARGET) if message.target_ids else (size, Whose.DRAFTER)
    tokens = codec.decode_id_tuple(message.tokens, "tokens", size, MOST_DRAFT_TOKENS)
    if rows:
        codec.checked(np.concatenate([row.ids for row in rows]), "rows", size)
    return Drafted(
        epoch=message.epoch,
        draft_tokens=tuple(
            DraftToken(token, rows[place] if rows else None, whose) for place, token in enumerate(tokens)
        ),
        seconds=codec.decode_seconds(message.microseconds),
        reason=message.reason,
        first=message.first,
        branches=tuple(_read_branch(one, f"branches[{place}]", size) for place, one in enumerate(message.branches)),
        queued=codec.decode_seconds(message.queued_microseconds),
    )


def _read_branch(message: drafter_pb.Branch, name: str, size: int | None) -> Branch:
    if not message.number:
        raise BadMessage(f"{name}.number must be at least 1; 0 is none")
    letters = codec.decode_letters(message.letters, f"{name}.letters")
    if not letters:
        raise BadMessage(f"{name}.letters is empty; something must replace what is refused")
    tokens = codec.decode_id_tuple(message.tokens, f"{name}.tokens", size, MOST_DRAFT_TOKENS)
    return Branch(message.number, message.offset, letters, tokens)


def _write_scored(reply: Scored, written: Written) -> drafter_pb.Scored:
    seconds = codec.encode_seconds(reply.seconds)
    return drafter_pb.Scored(epoch=reply.epoch, probabilities=reply.probabilities.tolist(), microseconds=seconds)


def _read_scored(message: drafter_pb.Scored, share: object, size: int | None) -> Scored:
    check_max(len(message.probabilities), MAX_STRINGS, "probabilities")
    probabilities = np.array(message.probabilities, dtype=np.float64)
    if not bool(np.all((probabilities >= 0) & (probabilities <= 1))):  # false for NaN as well
        raise BadMessage("probabilities has one that is not between 0 and 1")
    return Scored(message.epoch, probabilities, codec.decode_seconds(message.microseconds))


def _drafter_columns(frame: drafter_pb.DraftReplies, size: int | None) -> Sequence[Shares[Any]]:
    check_max(sum(len(message.drafted.branches) for message in frame.replies), MAX_BRANCHES, "the frame's branches")
    with_rows = [message.drafted.tokens for message in frame.replies if message.drafted.with_rows]
    check_max(sum(map(len, with_rows)), codec.MAX_LISTS, "the frame's tokens with rows")
    drawn = [token for tokens in with_rows for token in tokens]
    return (Shares(codec.decode_rows(frame.rows, "rows", None, drawn), "rows"),)


# Both.


def _alike(value: type, field: str, message: Callable[..., Any]) -> Kind:
    """Messages that have the same fields as their plain values, none of which must be checked."""
    names = [one.name for one in fields(value)]
    parts: Any = attrgetter(*names) if len(names) > 1 else lambda message: [getattr(message, name) for name in names]
    return Kind(value, field, lambda plain, _: message(**vars(plain)), lambda message, *_: value(*parts(message)))


def _weight_of_node(node: Row | Sample) -> int:
    likely = 5 * len(node.likely)
    if isinstance(node, Sample):
        return 5 + likely
    return len(node.ids) * (2 if node.log_probabilities is None else 3) + likely


def _weight_of_reply(reply: PassDone | PromptScored) -> int:
    if isinstance(reply, PromptScored):
        return sum(map(_weight_of_node, reply.tokens))
    return sum(map(_weight_of_node, reply.nodes)) + len(reply.hidden.states)


def _weight_of_pass(request: Pass) -> int:
    return len(request.committed) + len(request.tree) + sum(map(len, request.listed))


def _weight_of_open(opening: OpenTarget | OpenDrafter) -> int:
    grammar, allowed = opening.options.grammar, opening.allowed if isinstance(opening, OpenDrafter) else None
    lists = (opening.prompt, allowed, None if grammar is None else grammar.text)
    return sum(0 if one is None else len(one) for one in lists)


def _weight_of_drafted(reply: Drafted) -> int:
    return sum(1 if token.row is None else 2 * len(token.row.ids) for token in reply.draft_tokens)


OPENED, ENDED = _alike(Opened, "opened", common.Opened), _alike(SessionEnded, "ended", common.SessionEnded)
CLOSE = _alike(EndSession, "close", common.CloseSession)
TARGET: RoleCodec[OpenTarget, Pass | FetchRow | RunTo | ScorePrompt, PassDone | RowFetched | PromptScored] = RoleCodec(
    name="target",
    other="drafter",
    service="crossdraft.v1.Target",
    stream="Verify",
    requests=Direction(
        target_pb.VerifyRequests,
        "requests",
        (
            Kind(OpenTarget, OPEN, _write_open_target, _read_open_target, _weight_of_open),
            Kind(Pass, "next_pass", _write_pass, _read_pass, _weight_of_pass, lambda one, of: of[0].take(one.listed)),
            Kind(FetchRow, "fetch", _write_fetch, _read_fetch),
            _alike(RunTo, "run_to", target_pb.RunTo),
            Kind(ScorePrompt, "score", lambda one, _: target_pb.ScorePrompt(**vars(one)), _read_prompt_request),
            CLOSE,
        ),
        lambda frame, size: (Shares(codec.decode_lists(frame.listed, "listed", size).split(), "lists"),),
    ),
    replies=Direction(
        target_pb.VerifyReplies,
        "replies",
        (
            OPENED,
            Kind(PassDone, "done", _write_done, _read_done, _weight_of_reply, _share_of_done),
            Kind(RowFetched, "fetched", _write_fetched, _read_fetched, lambda one: 4 * len(one.row.ids)),
            Kind(PromptScored, "scored", _write_prompt, _read_prompt, _weight_of_reply, _share_of_prompt),
            ENDED,
        ),
        _target_columns,
    ),
)
DRAFTER: RoleCodec[OpenDrafter, Draft | Advance | Score, Drafted | Scored] = RoleCodec(
    name="drafter",
    other="target",
    service="crossdraft.v1.Drafter",
    stream="Draft",
    requests=Direction(
        drafter_pb.DraftRequests,
        "requests",
        (
            Kind(OpenDrafter, OPEN, _write_open_drafter, _read_open_drafter, _weight_of_open),
            Kind(Draft, "draft", _write_draft, _read_draft, lambda one: len(one.letters) + len(one.hidden.states)),
            # No upper limit: an epoch in which everything is accepted may be long. What is limited is each advance.
            _alike(Advance, "advance", drafter_pb.Advance),
            Kind(Score, "score", _write_score, _read_score, lambda one: sum(map(len, one.strings))),
            CLOSE,
        ),
    ),
    replies=Direction(
        drafter_pb.DraftReplies,
        "replies",
        (
            OPENED,
            Kind(Drafted, "drafted", _write_drafted, _read_drafted, _weight_of_drafted, _share_of_drafted),
            Kind(Scored, "scored", _write_scored, _read_scored, lambda one: 8 * len(one.probabilities)),
            ENDED,
        ),
        _drafter_columns,
    ),
)
