"""Protobuf messages to plain values and back: those to a target and from it."""

from crossdraft.rpc import codec
from crossdraft.rpc.codec import check_max
from crossdraft.rpc.errors import BadMessage
from crossdraft.types.messages import (
    MOST_DRAFT_TOKENS,
    MOST_LIKELY,
    MOST_RUN,
    FetchRow,
    Opened,
    OpenTarget,
    Pass,
    PassDone,
    RowFetched,
    RunTo,
    Sample,
)
from crossdraft.types.rows import Row
from crossdraft.types.trees import ROOT, TokenTree
from crossdraft.v1 import common_pb2
from crossdraft.v1 import target_pb2 as pb

Request = OpenTarget | Pass | FetchRow | RunTo
Reply = Opened | PassDone | RowFetched
DEFAULT_HEAD = 64  # ids of a row that travel when the client does not say how many
MAX_HEAD = 4096
MAX_NODES = 17 * MOST_DRAFT_TOKENS  # of a pass's tree: sixteen paths, and some


def encode_request(request: Request) -> pb.VerifyRequest:
    """One message to a target."""
    match request:
        case OpenTarget():
            return pb.VerifyRequest(open=_encode_open(request))
        case Pass():
            return pb.VerifyRequest(next_pass=_encode_pass(request))
        case FetchRow():
            return pb.VerifyRequest(fetch=_encode_fetch(request))
        case RunTo():
            return pb.VerifyRequest(run_to=pb.RunTo(**vars(request)))


def decode_request(message: pb.VerifyRequest, vocabulary_size: int | None) -> Request:
    """One message to a target; raises BadMessage."""
    match message.WhichOneof("message"):
        case "open":
            return _decode_open(message.open, vocabulary_size)
        case "next_pass":
            return _decode_pass(message.next_pass, vocabulary_size)
        case "fetch":
            return _decode_fetch(message.fetch, vocabulary_size)
        case "run_to":
            return RunTo(message.run_to.number, message.run_to.tokens)
        case _:
            raise BadMessage("a VerifyRequest must be one of open, next_pass, fetch and run_to")


def encode_reply(reply: Reply) -> pb.VerifyReply:
    """One message from a target."""
    match reply:
        case Opened():
            return pb.VerifyReply(opened=common_pb2.Opened(**vars(reply)))
        case PassDone():
            return pb.VerifyReply(done=_encode_done(reply))
        case RowFetched():
            return pb.VerifyReply(fetched=_encode_fetched(reply))


def decode_reply(message: pb.VerifyReply, vocabulary_size: int | None) -> Reply:
    """One message from a target; raises BadMessage."""
    match message.WhichOneof("message"):
        case "opened":
            return Opened(message.opened.fingerprint)
        case "done":
            return _decode_done(message.done, vocabulary_size)
        case "fetched":
            return _decode_fetched(message.fetched, vocabulary_size)
        case _:
            raise BadMessage("a VerifyReply must be one of opened, done and fetched")


def _encode_open(request: OpenTarget) -> pb.OpenTarget:
    options, noise = codec.encode_options(request.options), codec.encode_noise(request.noise)
    return pb.OpenTarget(**vars(request) | {"options": options, "noise": noise})


def _decode_open(message: pb.OpenTarget, vocabulary_size: int | None) -> OpenTarget:
    if not message.prompt:
        raise BadMessage("prompt is empty; a target needs at least one id, for instance its begin of sequence")
    check_max(message.head, MAX_HEAD, "head")
    if message.likely > MOST_LIKELY:
        raise BadMessage(f"likely must be at most {MOST_LIKELY}, got {message.likely}")
    return OpenTarget(
        prompt=codec.decode_id_tuple(message.prompt, "prompt", vocabulary_size),
        options=codec.decode_options(message.options, vocabulary_size),
        noise=codec.decode_noise(message.noise) if message.HasField("noise") else None,
        head=message.head if message.HasField("head") else DEFAULT_HEAD,
        likely=message.likely,
        ignore_stops=message.ignore_stops,
    )


def _encode_pass(request: Pass) -> pb.Pass:
    if request.wanted == ():
        raise ValueError("a pass must want something: wanted is None for everything, or has at least the root")
    tree = request.tree
    parents = None if _is_chain(tree) else [at + 1 for at in tree.parents]
    changed = {
        "tree": pb.TokenTree(tokens=tree.tokens, parents=parents),
        "listed": codec.encode_lists(codec.joined(request.listed)) if request.listed else None,
        "run": request.run if request.run > 1 else 0,
    }
    return pb.Pass(**vars(request) | changed)


def _decode_pass(message: pb.Pass, vocabulary_size: int | None) -> Pass:
    tree = _decode_tree(message.tree, vocabulary_size)
    wanted = tuple(message.wanted) or None
    if wanted is not None and (max(wanted) > len(tree) or list(wanted) != sorted(set(wanted))):
        raise BadMessage(f"wanted must be ascending, from 0 (the root) to {len(tree)} (the last node), got {wanted}")
    answered = 1 + len(tree) if wanted is None else len(wanted)
    listed = codec.decode_lists(message.listed, "listed", vocabulary_size).split()
    if len(listed) not in (0, answered):
        raise BadMessage(f"listed has {len(listed)} lists; it needs none or {answered}, one a row answered")
    _check_run(message)
    return Pass(
        number=message.number,
        committed=codec.decode_id_tuple(message.committed, "committed", vocabulary_size),
        tree=tree,
        listed=tuple(listed),
        wanted=wanted,
        draws=message.draws,
        run=max(1, message.run),
    )


def _check_run(message: pb.Pass) -> None:
    check_max(message.run, MOST_RUN, "run")
    if message.run > 1 and (message.tree.tokens or not message.draws):
        raise BadMessage("a run of several tokens needs draws, and has no tree")


def _decode_tree(message: pb.TokenTree, vocabulary_size: int | None) -> TokenTree:
    check_max(len(message.tokens), MAX_NODES, "tree.tokens")
    tokens = codec.decode_id_tuple(message.tokens, "tree.tokens", vocabulary_size)
    parents = tuple(parent - 1 for parent in message.parents) or tuple(range(ROOT, ROOT + len(tokens)))
    try:
        return TokenTree(tokens, parents)
    except ValueError as error:
        raise BadMessage(f"tree: {error}") from error


def _is_chain(tree: TokenTree) -> bool:
    return tree.parents == tuple(range(ROOT, ROOT + len(tree)))


def _encode_fetch(request: FetchRow) -> pb.FetchRow:
    return pb.FetchRow(**vars(request) | {"listed": codec.encode_ids(request.listed)})


def _decode_fetch(message: pb.FetchRow, vocabulary_size: int | None) -> FetchRow:
    listed = None
    if message.HasField("listed"):
        listed = codec.decode_ids(message.listed, "listed", vocabulary_size)
    return FetchRow(message.number, message.node, listed)


def _encode_done(reply: PassDone) -> pb.PassDone:
    """A pass's answers are all rows or all samples; raises ValueError if they are not."""
    message = pb.PassDone(
        number=reply.number,
        microseconds=codec.encode_seconds(reply.seconds),
        queued_microseconds=codec.encode_seconds(reply.queued),
        more=reply.more,
        forwards=reply.forwards if reply.forwards > 1 else 0,
        shared=reply.shared if reply.shared > 1 else 0,
        fed=reply.fed,
        first=reply.first,
    )
    rows = [node for node in reply.nodes if isinstance(node, Row)]
    samples = [node for node in reply.nodes if isinstance(node, Sample)]
    if bool(rows) == bool(samples):
        raise ValueError(f"a pass needs rows or samples as its answers, not {len(rows)} and {len(samples)}")
    if rows:
        message.rows.CopyFrom(codec.encode_rows(rows))
    else:
        message.samples.CopyFrom(codec.encode_samples(samples))
    return message


def _decode_done(message: pb.PassDone, vocabulary_size: int | None) -> PassDone:
    nodes: tuple[Row | Sample, ...]
    match message.WhichOneof("answers"):
        case "rows":
            nodes = tuple(codec.decode_rows(message.rows, "rows", vocabulary_size))
        case "samples":
            nodes = codec.decode_samples(message.samples, vocabulary_size)
        case _:
            nodes = ()
    if not nodes:
        raise BadMessage("done has no rows and no samples; it needs one answer at least")
    seconds, queued = map(codec.decode_seconds, (message.microseconds, message.queued_microseconds))
    forwards, shared = max(1, message.forwards), max(1, message.shared)
    more, fed, first = message.more, message.fed, message.first
    return PassDone(message.number, nodes, seconds, queued, more, forwards, shared, fed, first)


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
