"""Protobuf to domain values and back: what is said to a target and by it."""

from crossdraft.rpc import codec
from crossdraft.rpc.codec import Opened
from crossdraft.rpc.errors import BadMessage
from crossdraft.v1 import common_pb2
from crossdraft.v1 import target_pb2 as pb
from crossdraft.verification.exchange import FetchRow, OpenTarget, Pass, PassDone, RowFetched, Sample
from crossdraft.verification.rows import Row
from crossdraft.verification.trees import TokenTree

Request = OpenTarget | Pass | FetchRow
Reply = Opened | PassDone | RowFetched

LOG_TOLERANCE = 1e-3  # nats above 0 that rounding in a model may give
DEFAULT_HEAD = 64  # ids of a row that travel when the client does not say how many


def encode_request(request: Request) -> pb.VerifyRequest:
    """One message to a target."""
    match request:
        case OpenTarget():
            return pb.VerifyRequest(open=_encode_open(request))
        case Pass():
            return pb.VerifyRequest(next_pass=_encode_pass(request))
        case FetchRow():
            return pb.VerifyRequest(fetch=_encode_fetch(request))


def decode_request(message: pb.VerifyRequest, vocabulary_size: int | None) -> Request:
    """One message to a target; raises BadMessage."""
    match message.WhichOneof("message"):
        case "open":
            return _decode_open(message.open, vocabulary_size)
        case "next_pass":
            return _decode_pass(message.next_pass, vocabulary_size)
        case "fetch":
            return _decode_fetch(message.fetch, vocabulary_size)
        case _:
            raise BadMessage("a VerifyRequest must be one of open, next_pass and fetch")


def encode_reply(reply: Reply) -> pb.VerifyReply:
    """One message from a target."""
    match reply:
        case Opened():
            return pb.VerifyReply(opened=common_pb2.Opened(fingerprint=reply.fingerprint))
        case PassDone():
            nodes = [_encode_node(node) for node in reply.nodes]
            return pb.VerifyReply(done=pb.PassDone(number=reply.number, nodes=nodes, seconds=reply.seconds))
        case RowFetched():
            row = codec.encode_row(reply.row)
            return pb.VerifyReply(fetched=pb.RowFetched(number=reply.number, node=reply.node, row=row))


def decode_reply(message: pb.VerifyReply, vocabulary_size: int | None) -> Reply:
    """One message from a target; raises BadMessage."""
    match message.WhichOneof("message"):
        case "opened":
            return Opened(message.opened.fingerprint)
        case "done":
            return _decode_done(message.done, vocabulary_size)
        case "fetched":
            fetched = message.fetched
            row = codec.decode_row(fetched.row, "row", vocabulary_size)
            return RowFetched(fetched.number, fetched.node, row)
        case _:
            raise BadMessage("a VerifyReply must be one of opened, done and fetched")


def _encode_open(request: OpenTarget) -> pb.OpenTarget:
    return pb.OpenTarget(
        prompt=request.prompt,
        options=codec.encode_options(request.options),
        noise=codec.encode_noise(request.noise),
        head=request.head,
    )


def _decode_open(message: pb.OpenTarget, vocabulary_size: int | None) -> OpenTarget:
    if not message.prompt:
        raise BadMessage("prompt is empty; a target needs at least one id, for instance its begin of sequence")
    return OpenTarget(
        prompt=codec.decode_id_tuple(message.prompt, "prompt", vocabulary_size),
        options=codec.decode_options(message.options, vocabulary_size),
        noise=codec.decode_noise(message.noise) if message.HasField("noise") else None,
        head=message.head if message.HasField("head") else DEFAULT_HEAD,
    )


def _encode_pass(request: Pass) -> pb.Pass:
    if request.wanted == ():
        raise ValueError("a pass must want something: wanted is None for everything, or has at least the root")
    tree = request.tree
    return pb.Pass(
        number=request.number,
        committed=request.committed,
        tree=pb.TokenTree(tokens=tree.tokens, parents=[parent + 1 for parent in tree.parents]),
        listed=codec.encode_id_lists(request.listed),
        wanted=request.wanted,
    )


def _decode_pass(message: pb.Pass, vocabulary_size: int | None) -> Pass:
    tree = _decode_tree(message.tree, vocabulary_size)
    wanted = tuple(message.wanted) or None
    if wanted is not None and (max(wanted) > len(tree) or list(wanted) != sorted(set(wanted))):
        raise BadMessage(f"wanted must be ascending, from 0 (the root) to {len(tree)} (the last node), got {wanted}")
    answered = 1 + len(tree) if wanted is None else len(wanted)
    if len(message.listed) not in (0, answered):
        raise BadMessage(f"listed has {len(message.listed)} lists; it needs none or {answered}, one a row answered")
    return Pass(
        number=message.number,
        committed=codec.decode_id_tuple(message.committed, "committed", vocabulary_size),
        tree=tree,
        listed=tuple(codec.decode_ids(ids.ids, "listed", vocabulary_size) for ids in message.listed),
        wanted=wanted,
    )


def _decode_tree(message: pb.TokenTree, vocabulary_size: int | None) -> TokenTree:
    tokens = codec.decode_id_tuple(message.tokens, "tree.tokens", vocabulary_size)
    try:
        return TokenTree(tokens, tuple(parent - 1 for parent in message.parents))
    except ValueError as error:
        raise BadMessage(f"tree: {error}") from error


def _encode_fetch(request: FetchRow) -> pb.FetchRow:
    return pb.FetchRow(number=request.number, node=request.node, listed=codec.encode_id_list(request.listed))


def _decode_fetch(message: pb.FetchRow, vocabulary_size: int | None) -> FetchRow:
    listed = None
    if message.HasField("listed"):
        listed = codec.decode_ids(message.listed.ids, "listed", vocabulary_size)
    return FetchRow(message.number, message.node, listed)


def _encode_node(node: Row | Sample) -> pb.Node:
    if isinstance(node, Row):
        return pb.Node(row=codec.encode_row(node))
    return pb.Node(sample=pb.Sample(token=node.token, log_probability=node.log_probability))


def _decode_node(message: pb.Node, name: str, vocabulary_size: int | None) -> Row | Sample:
    match message.WhichOneof("answer"):
        case "row":
            return codec.decode_row(message.row, f"{name}.row", vocabulary_size)
        case "sample":
            (token,) = codec.decode_id_tuple([message.sample.token], f"{name}.sample", vocabulary_size)
            if not message.sample.log_probability <= LOG_TOLERANCE:  # false for NaN as well
                raise BadMessage(f"{name}.sample has the log-probability {message.sample.log_probability}; at most 0")
            return Sample(token, message.sample.log_probability)
        case _:
            raise BadMessage(f"{name} must be a row or a sample")


def _decode_done(message: pb.PassDone, vocabulary_size: int | None) -> PassDone:
    if not message.nodes:
        raise BadMessage("done has no nodes; it needs the root at least")
    nodes = tuple(_decode_node(node, f"nodes[{place}]", vocabulary_size) for place, node in enumerate(message.nodes))
    return PassDone(message.number, nodes, codec.check_seconds(message.seconds))
