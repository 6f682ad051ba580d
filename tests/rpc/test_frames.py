"""Frames: messages of many sessions survive the wire together, columns are shared out, damage is known as such."""

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdraft.rpc.errors import BadMessage
from crossdraft.rpc.frames import DRAFTER, TARGET, EndSession, FrameCodec, SessionEnded
from crossdraft.rpc.memory import MemoryChannel, codec_of
from crossdraft.types.messages import Drafted, OpenDrafter, OpenTarget, Pass, PassDone, RowFetched, Sample
from crossdraft.types.rows import DraftToken, Row
from crossdraft.types.trees import TokenTree
from crossdraft.v1 import drafter_pb2, target_pb2
from tests.conftest import FULL
from tests.golden import messages
from tests.rpc import values
from tests.rpc.values import SIZE

MUTATIONS = 10_000 if FULL else 2_000  # of all kinds of frames together
Messages = list[tuple[int, Any]]


@dataclasses.dataclass(frozen=True)
class Direction:
    """One of the four ways that frames go."""

    writes: FrameCodec[Any, Any]
    reads: FrameCodec[Any, Any]
    frame: Any  # its protobuf message
    messages: st.SearchStrategy[Any]

    def travelled(self, batch: Sequence[tuple[int, Any]]) -> Messages:
        return list(self.reads.decode(self.writes.encode(batch)))


def plain(value: object) -> object:
    """A value as nested lists, which compare by content; enums and numbers as they are."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Enum) or not dataclasses.is_dataclass(value):
        return [plain(part) for part in value] if isinstance(value, tuple) else value
    fields = [field.name for field in dataclasses.fields(value) if field.init]
    return [type(value).__name__, *(plain(getattr(value, name)) for name in fields)]


def requested(requests: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """With ids in openings, and ends of sessions."""
    openings = OpenTarget | OpenDrafter
    named = requests.map(lambda one: dataclasses.replace(one, request_id="r1") if isinstance(one, openings) else one)
    return named | st.just(EndSession())


ended = st.builds(SessionEnded, st.integers(0, 16), st.text(max_size=8))
to_target, of_target = TARGET.client(SIZE), TARGET.server(SIZE)
to_drafter, of_drafter = DRAFTER.client(SIZE), DRAFTER.server(SIZE)
DIRECTIONS = {
    "to a target": Direction(to_target, of_target, target_pb2.VerifyRequests, requested(values.target_requests)),
    "of a target": Direction(of_target, to_target, target_pb2.VerifyReplies, values.target_replies | ended),
    "to a drafter": Direction(to_drafter, of_drafter, drafter_pb2.DraftRequests, requested(values.drafter_requests)),
    "of a drafter": Direction(of_drafter, to_drafter, drafter_pb2.DraftReplies, values.drafter_replies | ended),
}
every_direction = pytest.mark.parametrize("direction", DIRECTIONS.values(), ids=DIRECTIONS)
numbers = st.integers(0, 2**32 - 1)  # of sessions


@every_direction
@settings(max_examples=40)
@given(data=st.data())
def test_a_batch_is_what_each_of_its_messages_is_alone(direction: Direction, data: st.DataObject) -> None:
    sessions = st.integers(1, 3) | numbers
    batch = data.draw(st.lists(st.tuples(sessions, direction.messages), max_size=8))
    together = direction.travelled(batch)
    alone = [message for one in batch for message in direction.travelled([one])]
    assert plain(tuple(together)) == plain(tuple(alone)) == plain(tuple(batch))


@every_direction
@settings(max_examples=40)
@given(data=st.data())
def test_a_message_weighs_at_most_what_it_is_about_to_have(direction: Direction, data: st.DataObject) -> None:
    """A frame is made of messages that weigh half a limit: it must not be many times as long."""
    message = data.draw(direction.messages)
    assert direction.writes.weight(message) <= 3 * len(direction.writes.encode([(1, message)])) + 64


@every_direction
@settings(max_examples=40)
@given(data=st.data())
def test_memory_carries_what_a_wire_would(direction: Direction, data: st.DataObject) -> None:
    """Rows that their service has not rounded, too, so that an output does not depend on where the services run."""
    within = codec_of(MemoryChannel("in-process:1"), direction.writes)
    batch = data.draw(st.lists(st.tuples(numbers, direction.messages), max_size=8))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    if direction is DIRECTIONS["of a target"]:
        shares = rng.dirichlet(np.ones(9), 3)
        heads = [Row(rng.permutation(9)[:8], share[:8], float(share[8])) for share in shares]
        whole = Row(rng.permutation(9), shares[0])
        batch += [(1, PassDone(1, (*heads, whole), 0.0)), (2, RowFetched(1, 0, heads[0])), (2, RowFetched(1, 1, whole))]
    assert plain(tuple(within.decode(within.encode(batch)))) == plain(tuple(direction.travelled(batch)))


def row(*listed: int, tail: float = 0.0) -> Row:
    """The first id has what the others and the tail leave."""
    others = [2.0**-8] * (len(listed) - 1)
    return Row(np.array(listed), np.array([1 - tail - sum(others), *others]), tail)


def sample(token: int, *likely: int) -> Sample:
    return Sample(token, -1.0, tuple((one, -2.0) for one in likely))


TWO_WITH_ROWS = [(1, PassDone(1, (row(1, 2), row(3)), 0.0)), (2, PassDone(1, (row(4),), 0.0))]
TWO_WITH_SAMPLES = [(1, PassDone(1, (sample(1, 2), sample(3)), 0.0)), (2, PassDone(1, (sample(4),), 0.0))]
TWO_WITH_LISTS = [(1, Pass(1, (), TokenTree(), (np.array([4]),))), (2, Pass(1, (), TokenTree(), (np.array([5, 6]),)))]
TWO_WITH_DRAFTS = [(number, Drafted(1, (DraftToken(3, row(3)),), 0.0)) for number in (1, 2)]


@pytest.mark.parametrize("change", [-1, 1, 2**31], ids=["less", "more", "far more"])
@pytest.mark.parametrize(
    ("direction", "batch", "part", "column"),
    [
        ("of a target", TWO_WITH_ROWS, "done", "rows"),
        ("of a target", TWO_WITH_SAMPLES, "done", "samples"),
        ("to a target", TWO_WITH_LISTS, "next_pass", "listed"),
    ],
)
@pytest.mark.parametrize("which", [0, 1])
def test_messages_that_name_more_or_less_than_the_columns_have_spoil_their_frame(
    direction: str, batch: Messages, part: str, column: str, which: int, change: int
) -> None:
    way = DIRECTIONS[direction]
    frame = way.frame.FromString(way.writes.encode(batch))
    message = getattr((frame.requests if part == "next_pass" else frame.replies)[which], part)
    setattr(message, column, getattr(message, column) + change)
    with pytest.raises(BadMessage, match=r"the frame has \d (rows|samples|lists); its messages name (more|\d)"):
        list(way.reads.decode(frame.SerializeToString()))


@every_direction
@settings(max_examples=40)
@given(data=st.data())
def test_a_message_that_means_nothing_is_its_sessions_own(direction: Direction, data: st.DataObject) -> None:
    before, after = (data.draw(st.lists(st.tuples(numbers, direction.messages), max_size=3)) for _ in range(2))
    frame = direction.frame.FromString(direction.writes.encode(before))
    kind = "requests" if hasattr(frame, "requests") else "replies"
    getattr(frame, kind).add(session=77)
    frame.MergeFrom(direction.frame.FromString(direction.writes.encode([])))
    later = direction.frame.FromString(direction.writes.encode(after))
    getattr(frame, kind).extend(getattr(later, kind))
    if any(field.name in ("rows", "samples", "listed") for field, _ in later.ListFields()):
        return  # columns of two frames are not joined by a copy
    got = list(direction.reads.decode(frame.SerializeToString()))
    number, error = got.pop(len(before))
    assert number == 77
    assert isinstance(error, BadMessage)
    assert plain(tuple(got)) == plain((*before, *after))


GOLDEN = (messages.TO_TARGETS, messages.FROM_TARGETS, messages.TO_DRAFTERS, messages.FROM_DRAFTERS)  # as DIRECTIONS
MIXED: tuple[list[Messages], ...] = ([TWO_WITH_LISTS], [TWO_WITH_ROWS + TWO_WITH_SAMPLES], [], [TWO_WITH_DRAFTS])
VALID = {  # few messages in a frame: a change anywhere is often one of a message's own
    way: [*mixed, *([*enumerate(list(golden.values())[at : at + 2], 1)] for at in range(0, len(golden), 2))]
    for way, golden, mixed in zip(DIRECTIONS, GOLDEN, MIXED, strict=True)
}
FRAMES = {way: [DIRECTIONS[way].writes.encode(batch) for batch in batches] for way, batches in VALID.items()}
NUMBERS = (0, 1, 2, 7, SIZE - 1, SIZE, 2**16, 2**31, 2**32 - 1)


def mutated(raw: bytes, frame: Any, chance: random.Random) -> bytes:
    """A frame of which some bits are turned over, or one that says something else in some of its fields."""
    if chance.random() < 0.25:
        made = bytearray(raw)
        for _ in range(chance.randint(1, 2)):
            made[chance.randrange(len(made))] ^= 1 << chance.randrange(8)
        return bytes(made[: chance.choice((len(made), len(made), chance.randrange(len(made))))])
    message = frame.FromString(raw)
    for _ in range(chance.randint(1, 3)):
        _change(message, chance)
    return bytes(message.SerializeToString())


def _change(message: Any, chance: random.Random) -> None:
    """One field of a message, or of one in it."""
    while True:
        field, value = chance.choice(message.ListFields() or [(None, None)])
        if field is None:
            return
        inner = chance.choice(value) if field.is_repeated and field.message_type else value
        if not field.message_type or chance.random() < 0.1:
            break
        message = inner
    if field.is_repeated:
        at = chance.randrange(len(value))
        match chance.randrange(3):
            case 0:
                del value[at]
            case 1:
                value.extend([value[at]] * chance.choice((1, 2, 100)))
            case _ if not field.message_type:
                value[at] = _another(value[at], chance)
    elif field.message_type or chance.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _another(value, chance))


def _another(value: Any, chance: random.Random) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return chance.choice((*NUMBERS, value + 1, max(0, value - 1))) % 2**32
        case float():
            return chance.choice((0.0, -1.0, 2.0, 1e30, float("nan"), float("inf")))
        case bytes():
            cut = chance.randrange(len(value) + 1)
            return value[:cut] + chance.randbytes(chance.randint(0, 3)) + value[cut + chance.randint(0, 3) :]
        case _:
            return value + chance.choice(("", "x", "\n", "\u0661"))


@pytest.mark.parametrize("way", DIRECTIONS)
def test_damaged_frames_are_known_as_such_and_raise_nothing_else(way: str) -> None:
    direction, chance, found = DIRECTIONS[way], random.Random(7), Counter[str]()
    frames = FRAMES[way]
    for number in range(MUTATIONS // len(DIRECTIONS)):
        try:
            got = list(direction.reads.decode(mutated(frames[number % len(frames)], direction.frame, chance)))
            found["bad messages"] += any(isinstance(message, BadMessage) for _, message in got)
            found["taken"] += 1
        except (BadMessage, DecodeError) as error:
            found[type(error).__name__] += 1
    assert min(found["taken"], found["DecodeError"]) > MUTATIONS // 50, found
    assert found["bad messages"] > MUTATIONS // 200, found
    assert found["BadMessage"] > MUTATIONS // 200 or way == "to a drafter", found
