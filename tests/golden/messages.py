"""One plain value of every kind of message, with the functions that write it to bytes and read it back."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import Message

from crossdraft.rpc import generation
from crossdraft.rpc.codec import decode_description, encode_description
from crossdraft.rpc.frames import DRAFTER, TARGET, EndSession, FrameCodec, SessionEnded
from crossdraft.session.events import Reason
from crossdraft.text.chat_template import ChatTemplate
from crossdraft.text.letters import ControlRole, Letters, Side
from crossdraft.types import messages
from crossdraft.types.output import ServedModel, Token
from crossdraft.types.request import Chat, GenerationRequest, Overlap
from crossdraft.types.request import Message as ChatMessage
from crossdraft.types.rows import DraftToken, Row, Whose
from crossdraft.types.statistics import Counts, Kind, LaneFigures, Statistics, Times, Trips
from crossdraft.types.trees import TokenTree
from crossdraft.v1.common_pb2 import Description as DescriptionMessage
from crossdraft.v1.generation_pb2 import GenerateReply, GenerateRequest, ModelsReply

SIZE = 300  # of the vocabularies


class Codec(NamedTuple):
    """Both ways of one kind of message; the same bytes for the same value."""

    to_bytes: Callable[[Any], bytes]
    from_bytes: Callable[[bytes], Any]


def message(kind: type[Message], encode: Callable[[Any], Message], decode: Callable[[Any], Any]) -> Codec:
    """Of messages that travel alone."""
    return Codec(
        lambda value: encode(value).SerializeToString(deterministic=True), lambda raw: decode(kind.FromString(raw))
    )


def frame(writes: FrameCodec[Any, Any], reads: FrameCodec[Any, Any]) -> Codec:
    """Of messages that travel in frames: each is the only one of its own, of session 1."""

    def to_bytes(value: Any) -> bytes:
        return writes.encode([(1, value)])

    def from_bytes(raw: bytes) -> Any:
        ((_, value),) = reads.decode(raw)
        return value

    return Codec(to_bytes, from_bytes)


TO_TARGET = frame(TARGET.client(None), TARGET.server(None))
FROM_TARGET = frame(TARGET.server(None), TARGET.client(None))
TO_DRAFTER = frame(DRAFTER.client(None), DRAFTER.server(None))
FROM_DRAFTER = frame(DRAFTER.server(None), DRAFTER.client(None))
DESCRIPTION = message(DescriptionMessage, encode_description, decode_description)
TO_FRONT = message(GenerateRequest, generation.encode_request, generation.decode_request)
FROM_FRONT = message(GenerateReply, generation.encode_reply, generation.decode_reply)
MODELS = message(ModelsReply, generation.encode_models, generation.decode_models)
OPTIONS = messages.SamplingOptions(0.7, 40, 0.9, 0.05, 1.1, -0.5, logit_bias=((3, 2.5), (299, -100.0)))
BANS = messages.SamplingOptions(
    frequency_penalty=0.5, allowed_token_ids=(1, 299), bad_word_ids=((1,), (2, 299)), min_tokens=3, end_ids=(7,)
)
NOISE = messages.NoiseKey(2**64 - 3, 7)
LETTERS = Letters("a\xe2\x82 " + ControlRole.END_OF_TURN.letter + Side.TARGET.control(5) + Side.DRAFTER.control(0))


def ids(*tokens: int) -> np.ndarray:
    """Token ids as an array."""
    return np.array(tokens, dtype=np.int64)


HEAD = Row(ids(7, 3, 9, 1, 250, 17, 2, 4, 30, 31), np.array([2.0**-n for n in range(2, 12)]), 0.5 + 2.0**-11)
WHOLE = Row(ids(5, 299), np.array([0.75, 0.25]))
LANE = LaneFigures("target", "", 11, 2**40, Trips((1, 0, 2), 0.25, 0.125), "lost it", 0.5, 0.0625, 2.0, 1.0)
CHAT = Chat((ChatMessage("system", "s"), ChatMessage("user", "u")))
NOTHING_MEASURED = Times(0.0, 0.0, 0.0, 0.0, 0, 0)
NONE = Statistics(method="", num_speculative_tokens=0, prompt_tokens=0, **vars(Counts()), **vars(NOTHING_MEASURED))
FIGURES = replace(NONE, method="coupled", tokens=3, accepted_at=(2, 1), seconds=0.5, bytes_sent=2**40, lanes=(LANE,))
ASKED = GenerationRequest(
    "héllo", options=OPTIONS, method="coupled", num_speculative_tokens=4, max_tokens=9, drafter_temperature=0.0,
    seed=2**64 - 1, choice=2, ignore_eos=True, stop=("\n", "é"), logprobs=0, committed=(1, 2), allow_inexact=True,
    audit=True, overlap=Overlap.ON, max_draft_tokens=8, min_draft_tokens=0, branches=0, branch_width=2, paths=3,
    speculation=True, row_width=32, head=16,
)  # fmt: skip
CONTROLS = ((1, "BEGIN_OF_SEQUENCE"), (2, "END_OF_SEQUENCE"))
TEMPLATE = ChatTemplate("{{ messages }}", (("bos_token", "<s>"),))
WITH_ROWS = (DraftToken(5, WHOLE, Whose.DRAFTER), DraftToken(299, WHOLE, Whose.DRAFTER))
LOGGED = replace(WHOLE, log_probabilities=np.array([-0.5, -2.0]), likely=((5, -0.5),))
SAMPLES = (messages.Sample(5, -0.5, ((5, -0.5), (6, -1.25))), messages.Sample(7, -3.0, ((8, -0.25), (7, -3.0))))
LIKELY = ((5, b"\xe2\x82", -0.5), (6, b"", -1.0))
TO_TARGETS: dict[str, object] = {
    "target open": messages.OpenTarget((1, 299, 7), OPTIONS, NOISE, 32, 5, True),
    "target open, defaults": messages.OpenTarget((1,), messages.SamplingOptions(), None),
    "pass over a tree": messages.Pass(
        3, (5, 6), TokenTree((8, 9, 10, 11), (-1, 0, 0, -1)), (ids(1, 2), ids(), ids(299)), (0, 2, 4)
    ),
    "pass over a chain": messages.Pass(2**32 - 1, (), TokenTree((8, 9, 10), (-1, 0, 1)), draws=True),
    "pass that runs": messages.Pass(4, (5,), TokenTree((), ()), draws=True, run=16),
    "fetch ids": messages.FetchRow(3, 2, ids(4, 256)),
    "fetch all": messages.FetchRow(3, 0),
    "run to": messages.RunTo(4, 40),
    "target open, bans": messages.OpenTarget((1,), BANS, None, likely=0, stop_ids=(7,)),
    "score prompt": messages.ScorePrompt(1, 5),
    "target closed": EndSession(),
}
FROM_TARGETS: dict[str, object] = {
    "target opened": messages.Opened("abc123"),
    "pass done, rows": messages.PassDone(3, (HEAD, WHOLE, Row.certain(4)), 0.0125, 0.001),
    "pass done, samples": messages.PassDone(4, SAMPLES, 0.5),
    "pass done, of a run": messages.PassDone(4, (messages.Sample(5, -0.5),), 0.5, 0.25, True, 2, 3, 90, 6),
    "row fetched, head": messages.RowFetched(3, 2, HEAD),
    "row fetched, whole": messages.RowFetched(3, 2, WHOLE),
    "pass done, log-probabilities": messages.PassDone(3, (LOGGED, WHOLE), 0.0125),
    "prompt scored": messages.PromptScored(1, (messages.Sample(5, -0.5, ((5, -0.5),), 1),), 0.5, True),
    "session ended": SessionEnded(11, "the context is full"),
}
TO_DRAFTERS: dict[str, object] = {
    "drafter open": messages.OpenDrafter(LETTERS, OPTIONS, NOISE, 64, ids(3, 9, 200), "digest", True, True),
    "drafter open, defaults": messages.OpenDrafter(Letters("a"), messages.SamplingOptions(), None, 0),
    "draft": messages.Draft(5, 2**40, LETTERS, 12, 4, 3, 2, 9, 6),
    "draft, defaults": messages.Draft(1, 0, Letters(""), 5),
    "advance": messages.Advance(5, 16),
    "score": messages.Score(5, 77, (Letters("ab"), LETTERS), 3),
}
FROM_DRAFTERS: dict[str, object] = {
    "drafter opened": messages.Opened("abc123"),
    "drafted, rows": messages.Drafted(5, WITH_ROWS, 0.003, "", 4, (), 0.001),
    "drafted, target's ids": messages.Drafted(5, (DraftToken(5, None, Whose.TARGET),), 0.003),
    "drafted, branches": messages.Drafted(
        5, (DraftToken(5, None, Whose.DRAFTER),), 0.0, branches=(messages.Branch(2, 70, Letters("xy"), (1, 2, 299)),)
    ),
    "drafted, stands aside": messages.Drafted(5, (), 0.0, "its context is full"),
    "scored": messages.Scored(5, np.array([1.0, 0.0, 0.3]), 0.004),
}
TO_FRONTS: dict[str, object] = {
    "generate, text": generation.Generate(ASKED, "r-1", "m", "d"),
    "generate, ids": generation.Generate(GenerationRequest((1, 299, 2**32 - 1), overlap=Overlap.OFF)),
    "generate, chat": generation.Generate(GenerationRequest(CHAT)),
}
FROM_FRONTS: dict[str, object] = {
    "token": generation.Committed((Token(5, "", b"\xe2\x82", Kind.ACCEPTED, -0.5, LIKELY),), 12.5),
    "token, corrected": generation.Committed((Token(6, "a", b"a", Kind.CORRECTED, None),), 0.0),
    "token, bonus": generation.Committed((Token(7, "b", b"b", Kind.BONUS, 0.0),), 1.0),
    "tokens of one pass": generation.Committed(
        (Token(5, "a", b"a", Kind.ACCEPTED, None), Token(7, "b", b"b", Kind.BONUS, None)), 1.0
    ),
    **{
        f"ended, {reason.value}": generation.OutputEnded(reason, figures, "r-1")
        for reason, figures in zip(Reason, (FIGURES, FIGURES, NONE, NONE), strict=True)
    },
}
VALUES = {  # by name: how it travels, and what
    name: (codec, value)
    for codec, values in (
        (TO_TARGET, TO_TARGETS),
        (FROM_TARGET, FROM_TARGETS),
        (TO_DRAFTER, TO_DRAFTERS),
        (FROM_DRAFTER, FROM_DRAFTERS),
        (
            DESCRIPTION,
            {"description": messages.Description("m", "{}", CONTROLS, (2, 3), SIZE, 512, "f0", "d1", True, TEMPLATE)},
        ),
        (TO_FRONT, TO_FRONTS),
        (FROM_FRONT, FROM_FRONTS),
        (
            MODELS,
            {"models": (ServedModel("a", 7, 64, ("x", "y"), ("slem",), True), ServedModel("b", 0, 1, (), (), False))},
        ),
    )
    for name, value in values.items()
}
