"""Frames of links, and the messages of target and drafter in them: plain values to protobuf and back.

A link is one stream between two processes, and a frame one message of it: messages of any number of sessions, each with
its session's number. `Direction` makes frames of them, and reads them from frames. Each function that writes a message
puts rows, samples and lists of ids into the frame's columns, and each one that reads is given its share of them; what
is wrong with a message raises BadMessage, with a text that names the field.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any, Generic, TypeVar

import numpy as np
from google.protobuf.message import Message

from crossdraft.rpc import codec
from crossdraft.rpc.codec import check_max, check_ranges
from crossdraft.rpc.errors import BadMessage
from crossdraft.text.letters import NOTHING
from crossdraft.types import messages as plain
from crossdraft.types.rows import DraftToken, Ids, Row, Whose
from crossdraft.types.trees import MOST_NODES
from crossdraft.v1 import common_pb2 as common
from crossdraft.v1 import drafter_pb2 as drafter_pb
from crossdraft.v1 import target_pb2 as target_pb

Opening = TypeVar("Opening")  # the message that begins a session
Ask = TypeVar("Ask")
Answer = TypeVar("Answer")
Sent = TypeVar("Sent")
Received = TypeVar("Received")
OPEN = "open"  # the field of an entry with which a session begins
MAX_MESSAGES = 256  # of a frame
MAX_SHARED = 2 << 20  # bytes of a frame that has more messages than one
MAX_HEAD = 4096
MAX_ROW_WIDTH = 1 << 16  # ids
MAX_STRINGS = 4096  # of one request for scores
MAX_STRING = 1 << 16  # letters of each of them
COUNT, SOME = (1, plain.MOST_DRAFT_TOKENS), (0, plain.MOST_DRAFT_TOKENS)  # draft tokens; time and answer grow with them
LIKELY = (0, plain.MOST_LIKELY)
DRAFT_RANGES = {
    "count": COUNT, "chunk": COUNT, "branch_width": COUNT, "branch_depth": SOME, "first": SOME,
    "tree_nodes": (0, MOST_NODES), "least_likely": (0, 1),
}  # fmt: skip
MAX_BRANCHES = plain.MOST_DRAFT_TOKENS * plain.MOST_DRAFT_TOKENS  # of a frame: as many as one reply may have


@dataclass(frozen=True)
class EndSession:
    """The client ends a session."""


@dataclass(frozen=True)
class SessionEnded:
    """The service ends a session."""

    code: int  # a status code of gRPC; 0: in order
    text: str = ""


@dataclass(frozen=True)
class FrameCodec(Generic[Sent, Received]):
    """How one side of a role's link writes its frames and reads those of the other side."""

    # Raises ValueError if a message is none, or columns are too long. The messages of a session are in order.
    encode: Callable[[Sequence[tuple[int, Sent]]], bytes]
    # What is wrong with one session's message only is returned as that message.
    # Raises BadMessage if the frame itself is wrong, or protobuf's DecodeError.
    decode: Callable[[bytes], Iterable[tuple[int, Received | BadMessage]]]
    weight: Callable[[Sent], int]  # about how many bytes a message will have, at least


class Shares(Generic[Received]):
    """A column of a frame that is read, of which its messages take their shares one after another."""

    def __init__(self, values: Sequence[Received], name: str) -> None:
        self._values = values
        self._name = name
        self._taken = 0

    def take(self, count: int) -> Sequence[Received]:
        """The next ones; raises BadMessage if there are fewer."""
        end = self._taken + count
        if end > len(self._values):
            raise BadMessage(f"the frame has {len(self._values)} {self._name}; its messages name more")
        taken, self._taken = self._values[self._taken : end], end
        return taken

    def check(self) -> None:
        """Raises BadMessage unless all are taken."""
        if self._taken != len(self._values):
            raise BadMessage(f"the frame has {len(self._values)} {self._name}; its messages name {self._taken}")


Columns = Mapping[str, Shares[Any]]
NOTHING_SHARED: Sequence[Any] = ()
# Columns of a frame that is written: what its messages have of one kind stands together.
Written = defaultdict[str, list[Any]]
COLUMNS: Mapping[str, Callable[[Any], Message]] = {
    "rows": codec.encode_rows,
    "samples": codec.encode_samples,
    "listed": lambda lists: codec.encode_lists(codec.joined(lists)),
}


@dataclass(frozen=True)
class Kind:
    """One kind of message of a direction."""

    value: type  # plain
    field: str  # of the entry of a frame
    write: Callable[[Any, Written], Message]  # of a plain value; raises ValueError
    read: Callable[[Any, Sequence[Any], int | None], Any]  # of the message, its share and the vocabulary's size
    share: Callable[[Any, Columns], Sequence[Any]] | None = None  # that the message has of the columns


@dataclass(frozen=True)
class Direction:
    """Frames of one direction of a role's links."""

    frame: type[Message]
    entries: str  # the field that has the messages
    kinds: Sequence[Kind]
    # Reads those of a frame, for a vocabulary of so many ids; raises BadMessage.
    columns: Callable[[Any, int | None], Columns] = lambda frame, size: {}

    @cached_property
    def _by_value(self) -> dict[type, Kind]:
        return {kind.value: kind for kind in self.kinds}

    @cached_property
    def _by_field(self) -> dict[str | None, Kind]:
        return {kind.field: kind for kind in self.kinds}

    def encode(self, messages: Sequence[tuple[int, Any]]) -> bytes:
        """A frame; raises ValueError."""
        frame: Any = self.frame()
        entries, written, kinds = getattr(frame, self.entries), Written(list), self._by_value
        for session, value in messages:
            kind = kinds[type(value)]
            entry = {"session": session, kind.field: kind.write(value, written)}
            if kind.field == OPEN:
                entry["request_id"] = value.request_id
            entries.add(**entry)
        for name, encode in COLUMNS.items():
            if column := written[name]:
                getattr(frame, name).CopyFrom(encode(column))
        raw: bytes = frame.SerializeToString()
        return raw

    def decode(self, raw: bytes, size: int | None) -> Iterator[tuple[int, Any]]:
        """The messages of a frame, for a vocabulary of so many ids; raises BadMessage or DecodeError."""
        frame = self.frame.FromString(raw)
        entries, kinds = getattr(frame, self.entries), self._by_field
        if len(entries) > MAX_MESSAGES:
            raise BadMessage(f"the frame has {len(entries)} messages; at most {MAX_MESSAGES} are taken")
        if len(entries) > 1 and len(raw) > MAX_SHARED:
            raise BadMessage(f"the frame has {len(raw)} bytes; {len(entries)} messages may have {MAX_SHARED} together")
        columns = self.columns(frame, size)
        for entry in entries:
            field = entry.WhichOneof("message")
            kind = kinds.get(field)
            if kind is None:
                *others, last = kinds
                yield entry.session, BadMessage(f"a message must be one of {', '.join(map(str, others))} and {last}")
                continue
            message = getattr(entry, field)
            share = NOTHING_SHARED if kind.share is None else kind.share(message, columns)
            try:
                value = kind.read(message, share, size)
                yield entry.session, replace(value, request_id=entry.request_id) if field == OPEN else value
            except BadMessage as error:
                yield entry.session, error
        for column in columns.values():
            column.check()


@dataclass(frozen=True)
class RoleCodec(Generic[Opening, Ask, Answer]):
    """One of the two services of the protos, and its frames."""

    name: str
    other: str  # the role that an address could be of by mistake
    service: str  # full name in the protos
    stream: str  # name of its bidirectional method
    requests: Direction
    replies: Direction

    def client(self, vocabulary_size: int | None) -> FrameCodec[Any, Any]:
        """Of a client, as `server` is of the service, for a vocabulary of so many ids; None: not known."""
        return FrameCodec(self.requests.encode, partial(self.replies.decode, size=vocabulary_size), weight_of)

    def server(self, vocabulary_size: int | None) -> FrameCodec[Any, Any]:
        return FrameCodec(self.replies.encode, partial(self.requests.decode, size=vocabulary_size), weight_of)


def _weight_of_open(opening: plain.OpenTarget | plain.OpenDrafter) -> int:
    return len(opening.prompt) + len(opening.options.grammar.text if opening.options.grammar else "")


WEIGHTS: Mapping[type, Callable[[Any], int]] = {  # of the messages that may be large
    plain.OpenTarget: _weight_of_open,
    plain.Pass: lambda request: len(request.committed) + sum(map(len, request.listed)),
    plain.PassDone: lambda reply: sum(map(codec.weight_of_node, reply.nodes)) + len(reply.hidden.states),
    plain.RowFetched: lambda reply: 4 * len(reply.row.ids),
    plain.PromptScored: lambda reply: sum(map(codec.weight_of_node, reply.tokens)),
    plain.OpenDrafter: _weight_of_open,
    plain.Draft: lambda request: len(request.letters) + len(request.hidden.states),
    plain.Drafted: lambda reply: sum(2 * len(token.row.ids) for token in reply.draft_tokens if token.row is not None),
    plain.Score: lambda request: sum(map(len, request.strings)),
    plain.Scored: lambda reply: 8 * len(reply.probabilities),
}


def weight_of(message: object) -> int:
    """About how many bytes a message will have, at least."""
    weigh = WEIGHTS.get(type(message))
    return 0 if weigh is None else weigh(message)


def _fields(message: Callable[..., Any], **encode: Callable[[Any], Any]) -> Callable[[Any, Written], Any]:
    """Writes messages that have the fields of their plain values, some of them encoded."""

    def write(value: Any, _: Written) -> Any:
        given = vars(value) | {name: change(getattr(value, name)) for name, change in encode.items()}
        given.pop("request_id", None)  # the frame has it
        return message(**given)

    return write


def _share(*names: str) -> Callable[[Any, Columns], Sequence[Any]]:
    """Of each of these columns as many as the message's field of the same name says."""
    if len(names) == 1:
        return lambda message, columns: columns[names[0]].take(getattr(message, names[0]))
    return lambda message, columns: [value for name in names for value in columns[name].take(getattr(message, name))]


_OPENING: dict[str, Callable[[Any], Any]] = {
    "options": codec.encode_options,
    "noise": lambda noise: noise and common.NoiseKey(**vars(noise)),
}


# Requests to a target.


def _read_open_target(message: target_pb.OpenTarget, share: object, size: int | None) -> plain.OpenTarget:
    if not message.prompt:
        raise BadMessage("prompt is empty; a target needs at least one id, for instance its begin of sequence")
    check_ranges(message, {"head": (0, MAX_HEAD), "likely": LIKELY})
    ids = {
        "prompt": codec.decode_id_tuple(message.prompt, "prompt", size),
        "stop_ids": codec.decode_id_tuple(message.stop_ids, "stop_ids", size, codec.MAX_STOPS),
    }
    options, noise = codec.decode_options(message.options, size), codec.decode_noise(message)
    return plain.OpenTarget(**codec.plain_fields(message, **ids, options=options, noise=noise))


def _write_pass(request: plain.Pass, written: Written) -> target_pb.Pass:
    if request.wanted == ():
        raise ValueError("a pass must want something: wanted is None for everything, or has at least the root")
    written["listed"] += request.listed
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


def _read_pass(message: target_pb.Pass, listed: Sequence[Ids], size: int | None) -> plain.Pass:
    tree = codec.decode_tree(message.tree, size)
    check_max(len(message.wanted), 1 + len(tree), "wanted")
    wanted = tuple(message.wanted) or None
    if wanted is not None and (max(wanted) > len(tree) or list(wanted) != sorted(set(wanted))):
        raise BadMessage(f"wanted must be ascending, from 0 (the root) to {len(tree)} (the last node), got {wanted}")
    answered = 1 + len(tree) if wanted is None else len(wanted)
    if len(listed) not in (0, answered):
        raise BadMessage(f"listed has {len(listed)} lists; it needs none or {answered}, one a row answered")
    check_ranges(message, {"run": (0, plain.MAX_RUN)})
    if message.run > 1 and (message.tree.tokens or not message.draws):
        raise BadMessage("a run of several tokens needs draws, and has no tree")
    committed = codec.decode_id_tuple(message.committed, "committed", size)
    return plain.Pass(message.number, committed, tree, tuple(listed), wanted, message.draws, max(1, message.run))


def _read_fetch(message: target_pb.FetchRow, share: object, size: int | None) -> plain.FetchRow:
    listed = codec.decode_ids(message.listed, "listed", size) if message.HasField("listed") else None
    return plain.FetchRow(message.number, message.node, listed)


def _read_prompt_request(message: target_pb.ScorePrompt, share: object, size: int | None) -> plain.ScorePrompt:
    check_ranges(message, {"likely": LIKELY})
    return plain.ScorePrompt(message.first, message.likely)


# Replies of a target.


def _write_done(reply: plain.PassDone, written: Written) -> target_pb.PassDone:
    """Raises ValueError unless its answers are all rows or all samples."""
    kinds, count = {*map(type, reply.nodes)}, len(reply.nodes)
    if kinds not in ({Row}, {plain.Sample}):
        rows = sum(isinstance(node, Row) for node in reply.nodes)
        raise ValueError(f"a pass needs rows or samples as its answers, not {rows} and {count - rows}")
    of_rows = kinds == {Row}
    written["rows" if of_rows else "samples"] += reply.nodes
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


def _read_done(message: target_pb.PassDone, nodes: Sequence[Row | plain.Sample], size: int | None) -> plain.PassDone:
    if bool(message.rows) == bool(message.samples):
        raise BadMessage("done needs rows or samples, one answer at least")
    seconds, queued = map(codec.decode_seconds, (message.microseconds, message.queued_microseconds))
    forwards, shared = max(1, message.forwards), max(1, message.shared)
    more, fed, first, hidden = message.more, message.fed, message.first, codec.decode_hidden(message)
    return plain.PassDone(message.number, tuple(nodes), seconds, queued, more, forwards, shared, fed, first, hidden)


def _write_fetched(reply: plain.RowFetched, written: Written) -> target_pb.RowFetched:
    row: Any = {"whole": codec.encode_whole(reply.row)} if reply.row.whole else {"head": codec.encode_rows([reply.row])}
    return target_pb.RowFetched(number=reply.number, node=reply.node, **row)


def _read_fetched(message: target_pb.RowFetched, share: object, size: int | None) -> plain.RowFetched:
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
    return plain.RowFetched(message.number, message.node, row)


def _write_prompt(reply: plain.PromptScored, written: Written) -> target_pb.PromptScored:
    written["samples"] += reply.tokens
    microseconds = codec.encode_seconds(reply.seconds)
    return target_pb.PromptScored(
        first=reply.first, samples=len(reply.tokens), microseconds=microseconds, more=reply.more
    )


def _read_prompt(
    message: target_pb.PromptScored, tokens: Sequence[plain.Sample], size: int | None
) -> plain.PromptScored:
    return plain.PromptScored(message.first, tuple(tokens), codec.decode_seconds(message.microseconds), message.more)


def _target_columns(frame: target_pb.VerifyReplies, size: int | None) -> Columns:
    rows, samples = codec.decode_rows(frame.rows, "rows", size), codec.decode_samples(frame.samples, size)
    return {"rows": Shares(rows, "rows"), "samples": Shares(samples, "samples")}


# Requests to a drafter.


def _read_open_drafter(message: drafter_pb.OpenDrafter, share: object, size: int | None) -> plain.OpenDrafter:
    if message.audited and not message.HasField("noise"):
        raise BadMessage("audited needs noise: without it no draw can be recomputed")
    check_ranges(message, {"row_width": (0, MAX_ROW_WIDTH)})
    checked = {
        "prompt": codec.decode_letters(message.prompt, "prompt"),
        "options": codec.decode_options(message.options, size),
        "noise": codec.decode_noise(message),
        "allowed": codec.decode_ids(message.allowed, "allowed", size) if message.HasField("allowed") else None,
    }
    return plain.OpenDrafter(**codec.plain_fields(message, **checked))


def _read_draft(message: drafter_pb.Draft, share: object, size: int | None) -> plain.Draft:
    check_ranges(message, DRAFT_RANGES)
    chunk, width = message.chunk or plain.MOST_DRAFT_TOKENS, message.branch_width or 1  # in their ranges, or unset
    letters, depth, nodes = codec.decode_letters(message.letters, "letters"), message.branch_depth, message.tree_nodes
    hidden = codec.decode_hidden(message)
    shape = chunk, depth, width, message.adopt, message.first, nodes, message.least_likely, hidden
    return plain.Draft(message.epoch, message.offset, letters, message.count, *shape)


def _read_score(message: drafter_pb.Score, share: object, size: int | None) -> plain.Score:
    check_ranges(message, {"tokens": COUNT})
    check_max(len(message.strings), MAX_STRINGS, "strings")
    strings = tuple(codec.decode_letters(raw, f"strings[{place}]") for place, raw in enumerate(message.strings))
    check_max(max(map(len, strings), default=0), MAX_STRING, "the longest of strings")
    if not all(strings):
        raise BadMessage(f"strings[{strings.index(NOTHING)}] is empty; every text begins with nothing")
    return plain.Score(message.epoch, message.offset, strings, message.tokens)


# Replies of a drafter.


def _write_drafted(reply: plain.Drafted, written: Written) -> drafter_pb.Drafted:
    """Raises ValueError unless all draft tokens have rows, or none, and ids of one vocabulary; or if the branches are
    too many for one frame."""
    rows = [draft_token.row for draft_token in reply.draft_tokens if draft_token.row is not None]
    kinds = {draft_token.whose for draft_token in reply.draft_tokens}
    if len(rows) not in (0, len(reply.draft_tokens)) or len(kinds) > 1:
        raise ValueError("the draft tokens of a reply must all have rows or none, and use the same ids")
    written["rows"] += rows
    written["branches"] += reply.branches
    if (branches := len(written["branches"])) > MAX_BRANCHES:
        raise ValueError(f"{branches} branches; at most {MAX_BRANCHES} are possible")
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


def _share_of_drafted(message: drafter_pb.Drafted, columns: Columns) -> Sequence[Row]:
    return columns["rows"].take(len(message.tokens)) if message.with_rows else ()


def _read_drafted(message: drafter_pb.Drafted, rows: Sequence[Row], size: int | None) -> plain.Drafted:
    """The known vocabulary is the drafter's own; the target's ids are checked by the session, which knows that one."""
    size, whose = (None, Whose.TARGET) if message.target_ids else (size, Whose.DRAFTER)
    tokens = codec.decode_id_tuple(message.tokens, "tokens", size, plain.MOST_DRAFT_TOKENS)
    if rows:
        codec.checked(np.concatenate([row.ids for row in rows]), "rows", size)
    branches = [codec.decode_branch(one, f"branches[{place}]", size) for place, one in enumerate(message.branches)]
    drafted = tuple(DraftToken(token, rows[place] if rows else None, whose) for place, token in enumerate(tokens))
    seconds, queued = map(codec.decode_seconds, (message.microseconds, message.queued_microseconds))
    return plain.Drafted(message.epoch, drafted, seconds, message.reason, message.first, tuple(branches), queued)


def _write_scored(reply: plain.Scored, written: Written) -> drafter_pb.Scored:
    seconds = codec.encode_seconds(reply.seconds)
    return drafter_pb.Scored(epoch=reply.epoch, probabilities=reply.probabilities.tolist(), microseconds=seconds)


def _read_scored(message: drafter_pb.Scored, share: object, size: int | None) -> plain.Scored:
    check_max(len(message.probabilities), MAX_STRINGS, "probabilities")
    probabilities = np.array(message.probabilities, dtype=np.float64)
    if not bool(np.all((probabilities >= 0) & (probabilities <= 1))):  # false for NaN as well
        raise BadMessage("probabilities has one that is not between 0 and 1")
    return plain.Scored(message.epoch, probabilities, codec.decode_seconds(message.microseconds))


def _drafter_columns(frame: drafter_pb.DraftReplies, size: int | None) -> Columns:
    check_max(sum(len(message.drafted.branches) for message in frame.replies), MAX_BRANCHES, "the frame's branches")
    with_rows = [message.drafted.tokens for message in frame.replies if message.drafted.with_rows]
    check_max(sum(map(len, with_rows)), codec.MAX_LISTS, "the frame's tokens with rows")
    drawn = [token for tokens in with_rows for token in tokens]
    return {"rows": Shares(codec.decode_rows(frame.rows, "rows", None, drawn), "rows")}


# Both.


def _alike(value: type, field: str, message: Callable[..., Any]) -> Kind:
    """Messages that have the same fields as their plain values, none of which must be checked."""
    names = [one.name for one in fields(value)]
    parts: Any = attrgetter(*names) if len(names) > 1 else lambda message: [getattr(message, name) for name in names]
    return Kind(value, field, _fields(message), lambda message, *_: value(*parts(message)))


_write_open_drafter = _fields(drafter_pb.OpenDrafter, prompt=str.encode, allowed=codec.encode_ids, **_OPENING)
_write_draft = _fields(drafter_pb.Draft, letters=str.encode, hidden=codec.encode_hidden)
_write_score = _fields(drafter_pb.Score, strings=lambda strings: [letters.encode() for letters in strings])
OPENED, ENDED = _alike(plain.Opened, "opened", common.Opened), _alike(SessionEnded, "ended", common.SessionEnded)
CLOSE = _alike(EndSession, "close", common.CloseSession)
_TargetRequest = plain.Pass | plain.FetchRow | plain.RunTo | plain.ScorePrompt
_TargetReply = plain.PassDone | plain.RowFetched | plain.PromptScored
TARGET: RoleCodec[plain.OpenTarget, _TargetRequest, _TargetReply] = RoleCodec(
    name="target",
    other="drafter",
    service="crossdraft.v1.Target",
    stream="Verify",
    requests=Direction(
        target_pb.VerifyRequests,
        "requests",
        (
            Kind(plain.OpenTarget, OPEN, _fields(target_pb.OpenTarget, **_OPENING), _read_open_target),
            Kind(plain.Pass, "next_pass", _write_pass, _read_pass, _share("listed")),
            Kind(plain.FetchRow, "fetch", _fields(target_pb.FetchRow, listed=codec.encode_ids), _read_fetch),
            _alike(plain.RunTo, "run_to", target_pb.RunTo),
            Kind(plain.ScorePrompt, "score", _fields(target_pb.ScorePrompt), _read_prompt_request),
            CLOSE,
        ),
        lambda frame, size: {"listed": Shares(codec.decode_lists(frame.listed, "listed", size).split(), "lists")},
    ),
    replies=Direction(
        target_pb.VerifyReplies,
        "replies",
        (
            OPENED,
            Kind(plain.PassDone, "done", _write_done, _read_done, _share("rows", "samples")),
            Kind(plain.RowFetched, "fetched", _write_fetched, _read_fetched),
            Kind(plain.PromptScored, "scored", _write_prompt, _read_prompt, _share("samples")),
            ENDED,
        ),
        _target_columns,
    ),
)
_DrafterRequest = plain.Draft | plain.Advance | plain.Score
DRAFTER: RoleCodec[plain.OpenDrafter, _DrafterRequest, plain.Drafted | plain.Scored] = RoleCodec(
    name="drafter",
    other="target",
    service="crossdraft.v1.Drafter",
    stream="Draft",
    requests=Direction(
        drafter_pb.DraftRequests,
        "requests",
        (
            Kind(plain.OpenDrafter, OPEN, _write_open_drafter, _read_open_drafter),
            Kind(plain.Draft, "draft", _write_draft, _read_draft),
            # No upper limit: an epoch in which everything is accepted may be long. What is limited is each advance.
            _alike(plain.Advance, "advance", drafter_pb.Advance),
            Kind(plain.Score, "score", _write_score, _read_score),
            CLOSE,
        ),
    ),
    replies=Direction(
        drafter_pb.DraftReplies,
        "replies",
        (
            OPENED,
            Kind(plain.Drafted, "drafted", _write_drafted, _read_drafted, _share_of_drafted),
            Kind(plain.Scored, "scored", _write_scored, _read_scored),
            ENDED,
        ),
        _drafter_columns,
    ),
)
