"""Protobuf messages to plain values and back: what the messages of target and drafter consist of.

Decoding checks everything that a value must fulfil, and raises `BadMessage` with a text that names the field. Sizes are
checked before anything is made of a field, as a few bytes can ask for much memory.

Records have the names of the protos' fields, so that `vars(record)` fills a message but for fields of other types.

Rows travel as multiples of 2^-24, several in one message as columns. Those of a drafter are on this grid already, since
it draws from what it sends; those of a target are rounded here, before anything is decided by them, which moves the
distribution by at most 3e-8 an id.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import accumulate, islice, repeat
from typing import Any

import numpy as np
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from numpy.typing import NDArray

from crossdraft.config.fields import LeftOut
from crossdraft.config.request import Sampling
from crossdraft.rpc.errors import BadMessage
from crossdraft.text.chat_template import ChatTemplate
from crossdraft.text.grammar import Grammar
from crossdraft.text.letters import NO_LETTER, ControlRole, Letters
from crossdraft.types.messages import (
    MOST_DRAFT_TOKENS,
    Branch,
    Description,
    HiddenStates,
    NoiseKey,
    Sample,
    SamplingDefaults,
    SamplingOptions,
)
from crossdraft.types.rows import NO_IDS, Ids, Probabilities, Row
from crossdraft.types.trees import TokenTree
from crossdraft.v1 import common_pb2 as pb
from crossdraft.v1 import drafter_pb2 as drafter_pb
from crossdraft.v1 import target_pb2 as target_pb

DESCRIBED = "crossdraft-described"  # metadata of a link: `identity_of` the description that its client has
MAX_IDS = 1 << 22  # of one list: no context is longer
MAX_NUMBERS = 1 << 23  # of one bit field, which may need a bit each and becomes eight bytes each
MAX_LISTS = 1 << 16  # rows, samples or lists of ids in one message
MAX_BIASES = 1 << 16  # of a request's logit_bias, and of its bad_words
MAX_STOPS = 1 << 16  # ids that may end an output
MAX_WORDS = 1 << 20  # ids of all bad_words
MAX_STATES = 1 << 12  # hidden states in one message
MAX_BITS = 32  # of a number
MAX_NODES = 17 * MOST_DRAFT_TOKENS  # of a pass's tree: sixteen paths, and some
SIZES = (1, 2, 3, 4)  # bytes of a number
MAX_MICROSECONDS = 2**32 - 1
MICRO = 1_000_000  # microseconds in a second
GRID = 1 << 24  # steps that a probability of one has
LEADING = 8  # ids of each row that may be much more probable than the others
SUM_TOLERANCE = 1e-4  # of a row's sum; float32 rounding of any row stays below it
NO_VALUES: Probabilities = np.empty(0)
LOG_TOLERANCE = 1e-3  # nats above 0 that rounding in a model may give
NO_STATES = HiddenStates()
Likely = tuple[tuple[int, float], ...]  # most probable ids and their log-probabilities
# Of sampling options, for what is left out; models' own settings that are not zero are always said.
DEFAULTS = {one.name: one.default for one in fields(Sampling) if not (isinstance(one.default, LeftOut) and one.default)}


def check_max(count: int, most: int, name: str) -> None:
    """Raises BadMessage if there is more than there may be."""
    if count > most:
        raise BadMessage(f"{name} has {count}; at most {most} are taken")


def check_ranges(message: Any, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raises BadMessage unless each of these fields is in its range, or is unset and has a default."""
    for name, (least, most) in ranges.items():
        value = getattr(message, name)
        if not least <= value <= most and _given(message, message.DESCRIPTOR.fields_by_name[name]):  # NaN as well
            raise BadMessage(f"{name} must be between {least} and {most}, got {value}")


def check_known(message: Message, name: str) -> None:
    """Drops fields of a later version, also of parts, and raises BadMessage if there were any: they may change the
    output."""
    size, own = message.ByteSize(), sorted({field.field_number for field in UnknownFieldSet(message)})  # type: ignore[attr-defined]
    message.DiscardUnknownFields()
    if message.ByteSize() != size:
        which = f"the fields {own}" if own else "fields in its parts"
        raise BadMessage(f"{name} has {which}, which this version does not know: update the service")


def decode_letters(raw: bytes, name: str) -> Letters:
    """Letters of a field, which are sent as the UTF-8 of their code points.

    Raises BadMessage: not UTF-8, or a code point that is no letter.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise BadMessage(f"{name} is not the UTF-8 of letters' code points: {error}") from error
    if found := NO_LETTER.search(text):
        raise BadMessage(f"{name} has U+{ord(found[0]):04X}, which is no letter; send each byte as U+0000..U+00FF")
    return Letters(text)


def decode_id_tuple(
    field: Sequence[int], name: str, vocabulary_size: int | None, most: int = MAX_IDS
) -> tuple[int, ...]:
    """At most so many token ids; raises BadMessage if one is outside the vocabulary (where its size is known)."""
    check_max(len(field), most, name)
    ids = tuple(field)
    if vocabulary_size is not None and ids and max(ids) >= vocabulary_size:
        raise BadMessage(f"{name} has the id {max(ids)}, but the vocabulary has {vocabulary_size} ids")
    return ids


def plain_fields(message: Message, **checked: Any) -> dict[str, Any]:
    """A message's fields but those that are messages, or are unset and have a default; lists as tuples. Those that
    were `checked` are as they are given."""
    others = [field for field in message.DESCRIPTOR.fields if field.message_type is None and field.name not in checked]
    return checked | {one.name: plain_value(getattr(message, one.name)) for one in others if _given(message, one)}


def _given(message: Message, field: Any) -> bool:
    return not field.has_presence or message.HasField(field.name)


def plain_value(value: Any) -> Any:
    """Of a field that is no message: a list as a tuple."""
    return value if isinstance(value, str | bytes | int | float) else tuple(value)


def encode_hidden(hidden: HiddenStates) -> pb.HiddenStates | None:
    return pb.HiddenStates(**vars(hidden)) if hidden.places else None


def decode_hidden(of: target_pb.PassDone | drafter_pb.Draft) -> HiddenStates:
    """Those of a message; raises BadMessage unless states are of one size, at places that ascend."""
    if not of.HasField("hidden"):
        return NO_STATES
    message = of.hidden
    places, size = tuple(message.places), len(message.states)
    check_max(len(places), MAX_STATES, "hidden.places")
    if list(places) != sorted(set(places)) or size % (2 * len(places) or size or 1) or bool(places) != bool(size):
        raise BadMessage(f"hidden has {size} bytes of states for the places {list(places)}, which must ascend")
    return HiddenStates(places, message.states)


def encode_seconds(seconds: float) -> int:
    """A duration in microseconds, at most the 71 minutes that a field holds; raises ValueError if it is none."""
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"seconds is {seconds}; it must be 0 or more")
    return min(round(seconds * MICRO), MAX_MICROSECONDS)


def decode_seconds(microseconds: int) -> float:
    return microseconds / MICRO


def encode_options(options: SamplingOptions) -> pb.SamplingOptions:
    """Sampling options; those that have a default of DEFAULTS are unset."""
    bias = [pb.LogitBias(id=token, bias=bias) for token, bias in options.logit_bias]
    words = [pb.Ids(ids=word) for word in options.bad_word_ids]
    changed: dict[str, Any] = {name: None for name, value in DEFAULTS.items() if getattr(options, name) == value}
    changed["grammar"] = options.grammar and pb.Grammar(**vars(options.grammar))
    return pb.SamplingOptions(**vars(options) | changed | {"logit_bias": bias, "bad_word_ids": words})


def decode_options(message: pb.SamplingOptions, vocabulary_size: int | None) -> SamplingOptions:
    """Sampling options; raises BadMessage when one is out of its range, or unknown."""
    check_known(message, "options")
    check_max(len(message.logit_bias), MAX_BIASES, "options.logit_bias")
    check_max(len(message.bad_word_ids), MAX_BIASES, "options.bad_word_ids")
    check_max(sum(len(word.ids) for word in message.bad_word_ids), MAX_WORDS, "options.bad_word_ids")
    check_max(len(message.end_ids), MAX_STOPS, "options.end_ids")

    def ids_of(field: Sequence[int], name: str) -> tuple[int, ...]:
        return decode_id_tuple(field, f"options.{name}", vocabulary_size)

    biased = ids_of([bias.id for bias in message.logit_bias], "logit_bias")
    checked = {name: ids_of(getattr(message, name), name) for name in ("allowed_token_ids", "end_ids")}
    given = plain_fields(message, **checked)  # the others have the default of both sides
    given["logit_bias"] = tuple(zip(biased, (bias.bias for bias in message.logit_bias), strict=True))
    given["bad_word_ids"] = tuple(ids_of(word.ids, "bad_word_ids") for word in message.bad_word_ids)
    try:
        given["grammar"] = Grammar(message.grammar.kind, message.grammar.text) if message.HasField("grammar") else None
        return SamplingOptions(**given)
    except ValueError as error:
        raise BadMessage(f"options: {error}") from error


def decode_noise(message: target_pb.OpenTarget | drafter_pb.OpenDrafter) -> NoiseKey | None:
    return NoiseKey(message.noise.seed, message.noise.choice) if message.HasField("noise") else None


def encode_description(description: Description) -> pb.Description:
    template = description.chat_template
    return pb.Description(
        **vars(description)
        | {
            "controls": [pb.Control(id=token, role=role) for token, role in description.controls],
            "defaults": description.defaults.given or None,
            "chat_template": template and pb.ChatTemplate(source=template.source, tokens=dict(template.tokens)),
        }
    )


@lru_cache(maxsize=4)
def described(description: Description) -> tuple[bytes, str]:
    """A description as it is sent, and its `identity_of`."""
    raw = encode_description(description).SerializeToString(deterministic=True)
    return raw, identity_of(raw)


def identity_of(raw: bytes) -> str:
    """Names a description as it was sent: a link says which one its client knows."""
    return blake2b(raw, digest_size=16).hexdigest()


def decode_description(message: pb.Description) -> Description:
    """What a service says of its model.

    Raises BadMessage: no ids, no context, ids outside the vocabulary, an unknown role, or a default out of its range.
    """
    if not (message.vocabulary_size and message.context and message.tokenizer_json and message.fingerprint):
        raise BadMessage("a description needs vocabulary_size, context, tokenizer_json and fingerprint")
    for name, field in (("controls", message.controls), ("chat_template.tokens", message.chat_template.tokens)):
        check_max(len(field), MAX_LISTS, name)
    for control in message.controls:
        if control.role not in ControlRole.__members__:
            raise BadMessage(f"controls has the role {control.role!r}; known are {', '.join(ControlRole.__members__)}")
    size = message.vocabulary_size
    stops = decode_id_tuple(message.stops, "stops", size, MAX_STOPS)
    controls = decode_id_tuple([control.id for control in message.controls], "controls", size)
    given = plain_fields(message, stops=stops)
    given["controls"] = tuple(zip(controls, (control.role for control in message.controls), strict=True))
    if message.HasField("chat_template"):
        template = message.chat_template
        if not template.source:
            raise BadMessage("chat_template has no source; leave it unset where there is none")
        given["chat_template"] = ChatTemplate(template.source, tuple(sorted(template.tokens.items())))
    try:
        defaults = SamplingDefaults(**plain_fields(message.defaults))
    except ValueError as error:
        raise BadMessage(f"defaults: {error}") from error
    return Description(**given, defaults=defaults)


@dataclass(frozen=True, eq=False)
class Lists:
    """Lists one after another."""

    counts: tuple[int, ...]  # the length of each
    ids: Ids  # shape (n,), n the sum of the counts

    @cached_property
    def owners(self) -> Ids:
        """Which list each id belongs to, shape (n,)."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    @property
    def spans(self) -> Iterator[slice]:
        end = 0
        for count in self.counts:
            yield slice(end, end := end + count)

    def sums(self, values: NDArray[np.int64] | Probabilities) -> Probabilities:
        """Of the values of each list, shape (m,); `values` has shape (n,). Exact for integers below 2^53."""
        if len(self.counts) == 1:
            return np.array([values.sum()], dtype=np.float64)
        return np.bincount(self.owners, values, len(self.counts)).astype(np.float64, copy=False)

    def split(self) -> list[Ids]:
        return [self.ids[span] for span in self.spans]


def encode_numbers(values: Ids) -> pb.Numbers:
    """Numbers (n,), int64, 0 to 2^32 - 1, in as many bytes as the largest needs."""
    size = max(1, (int(values.max()).bit_length() + 7) // 8) if len(values) else 1
    raw = values.astype("<u4").view(np.uint8).reshape(-1, 4)  # the bytes of each, the lowest first
    return pb.Numbers(count=len(values), size=size, data=raw[:, :size].tobytes())


def decode_numbers(message: pb.Numbers, name: str) -> Ids:
    """Numbers, shape (n,), int64; raises BadMessage unless there are as many bytes as are needed."""
    count, size = message.count, message.size
    if not count:
        return NO_IDS
    if size not in SIZES or len(message.data) != count * size:
        raise BadMessage(f"{name} has {len(message.data)} bytes, which are not {count} numbers of {size}")
    check_max(count, MAX_NUMBERS, name)
    if size == 3:
        wide = np.zeros((count, 4), dtype=np.uint8)
        wide[:, :3] = np.frombuffer(message.data, dtype=np.uint8).reshape(count, 3)
        return wide.view("<u4")[:, 0].astype(np.int64)
    return np.frombuffer(message.data, dtype=f"<u{size}").astype(np.int64)


def encode_ids(ids: Ids | None) -> pb.Numbers | None:
    """A list of ids, which may be empty, or nothing."""
    return None if ids is None else encode_numbers(ids)


def decode_ids(message: pb.Numbers, name: str, vocabulary_size: int | None) -> Ids:
    """Token ids, shape (n,), int64; raises BadMessage if one is outside the vocabulary (where its size is known)."""
    return checked(decode_numbers(message, name), name, vocabulary_size)


def checked(ids: Ids, name: str, vocabulary_size: int | None) -> Ids:
    """The ids themselves; raises BadMessage if one is outside the vocabulary (where its size is known)."""
    if vocabulary_size is not None and ids.size and int(ids.max()) >= vocabulary_size:
        raise BadMessage(f"{name} has the id {int(ids.max())}, but the vocabulary has {vocabulary_size} ids")
    return ids


def joined(lists: Sequence[Ids]) -> Lists:
    """Lists that are separate so far, at least one."""
    return Lists(tuple(map(len, lists)), lists[0] if len(lists) == 1 else np.concatenate(lists))


def encode_lists(lists: Lists) -> pb.IdLists:
    """Lists of ids; raises ValueError if they are too many for one message."""
    if len(lists.counts) > MAX_LISTS:
        raise ValueError(f"{len(lists.counts)} lists; at most {MAX_LISTS} are possible")
    return pb.IdLists(counts=lists.counts, ids=encode_numbers(lists.ids))


def decode_lists(message: pb.IdLists, name: str, vocabulary_size: int | None) -> Lists:
    """Lists of ids; raises BadMessage if there are more or fewer ids than they say, or ids outside the vocabulary."""
    if not message.ByteSize():
        return Lists((), NO_IDS)
    check_max(len(message.counts), MAX_LISTS, name)
    lists = Lists(tuple(message.counts), decode_ids(message.ids, name, vocabulary_size))
    if sum(lists.counts) != len(lists.ids):
        raise BadMessage(f"{name} has {len(lists.ids)} ids for lists of {sum(lists.counts)}")
    return lists


def encode_rows(rows: Sequence[Row]) -> pb.Rows:
    """Rows, at least one; their probabilities are rounded to the grid, and a row is whole afterwards if it was before.

    Raises ValueError: one is no distribution.
    """
    lists, steps = _steps(rows)
    leading = _leading(lists)
    large, small = encode_numbers(steps[leading]), encode_numbers(steps[~leading])
    message = pb.Rows(ids=encode_lists(lists), large=large, small=small)
    if any(row.log_probabilities is not None for row in rows):
        message.logged.extend(0 if row.log_probabilities is None else 1 + len(row.likely) for row in rows)
        for row in rows:
            message.log_probabilities.extend(NO_VALUES if row.log_probabilities is None else row.log_probabilities)
        _encode_likely([row.likely for row in rows], message)
    return message


def rounded(rows: Sequence[Row]) -> list[Row]:
    """Rows, at least one, as the other side reads them from a message; raises ValueError as `encode_rows` does."""
    lists, steps = _steps(rows)
    probabilities, tails = steps / GRID, ((GRID - lists.sums(steps)) / GRID).tolist()
    each = zip(rows, lists.spans, tails, strict=True)
    return [Row(row.ids, probabilities[at], tail, row.log_probabilities, row.likely) for row, at, tail in each]


def decode_rows(
    message: pb.Rows, name: str, vocabulary_size: int | None, drawn: Sequence[int] | None = None
) -> list[Row]:
    """Rows with exactly the probabilities that were sent; from each the token in `drawn` was drawn, if these are given.

    Raises BadMessage: numbers are missing, ids repeat in a row, one has more than there is, or cannot give its token.
    """
    if not (drawn or message.ByteSize()):  # most frames have none
        return []
    lists = decode_lists(message.ids, f"{name}.ids", vocabulary_size)
    ids = np.sort(lists.ids if len(lists.counts) == 1 else (lists.owners << MAX_BITS) | lists.ids)
    if (ids[1:] == ids[:-1]).any():
        raise BadMessage(f"{name}.ids are not distinct")
    large, small = decode_numbers(message.large, f"{name}.large"), decode_numbers(message.small, f"{name}.small")
    if len(large) != sum(min(count, LEADING) for count in lists.counts) or len(large) + len(small) != len(lists.ids):
        what = f"{len(large)} large and {len(small)} small probabilities"
        raise BadMessage(f"{name} has {len(lists.ids)} ids, but {what}")
    steps, leading = np.empty(len(lists.ids), dtype=np.int64), _leading(lists)
    steps[leading], steps[~leading] = large, small
    tails = ((GRID - lists.sums(steps)) / GRID).tolist()
    if tails and min(tails) < 0:
        raise BadMessage(f"{name} has a row that sums to {1 - min(tails):.6g}; at most 1 is possible")
    probabilities = steps / GRID
    if drawn is not None:
        _check_drawn(lists, steps, drawn, name)
    rows = [Row(lists.ids[at], probabilities[at], tail) for at, tail in zip(lists.spans, tails, strict=True)]
    return _logged(rows, message, name, vocabulary_size) if message.logged else rows


def _logged(rows: list[Row], message: pb.Rows, name: str, vocabulary_size: int | None) -> list[Row]:
    """The rows with their log-probabilities; raises BadMessage."""
    if len(message.logged) != len(rows):
        raise BadMessage(f"{name}.logged has {len(message.logged)} numbers for {len(rows)} rows")
    sizes = [len(row.ids) if count else 0 for row, count in zip(rows, message.logged, strict=True)]
    values = np.array(_logs(message.log_probabilities, sum(sizes), name))
    likely = _decode_likely(message, [max(0, count - 1) for count in message.logged], name, vocabulary_size)
    parts = np.split(values, np.cumsum(sizes)[:-1])
    return [
        replace(row, log_probabilities=part, likely=beside) if count else row
        for row, count, part, beside in zip(rows, message.logged, parts, likely, strict=True)
    ]


def _logs(values: Iterable[float], count: int, name: str) -> list[float]:
    """Log-probabilities; raises BadMessage unless there are so many."""
    found = list(values)
    if len(found) != count:
        raise BadMessage(f"{name} has {count} tokens but {len(found)} log-probabilities")
    if not all(map(LOG_TOLERANCE.__ge__, found)):  # false for NaN as well
        raise BadMessage(f"{name} has a log-probability that is not at most 0")
    return found


def _encode_likely(likely: Sequence[Likely], message: pb.Rows | target_pb.Samples) -> None:
    message.likely.extend(token for pairs in likely for token, _ in pairs)
    message.likely_log_probabilities.extend(value for pairs in likely for _, value in pairs)


def _decode_likely(
    message: pb.Rows | target_pb.Samples, counts: Sequence[int], name: str, vocabulary_size: int | None
) -> Iterator[Likely]:
    """The most probable ids of each; raises BadMessage unless there are so many."""
    given, count = len(message.likely), len(message.likely_log_probabilities)
    if not (given or count or any(counts)):
        return repeat((), len(counts))
    if not given == count == sum(counts):
        raise BadMessage(f"{name} has {given} likely ids and {count} values, and {sum(counts)} by its counts")
    ids = decode_id_tuple(message.likely, f"{name}.likely", vocabulary_size)
    pairs = iter(zip(ids, _logs(message.likely_log_probabilities, count, name), strict=True))
    return (tuple(islice(pairs, count)) for count in counts)


def _check_drawn(lists: Lists, steps: Ids, drawn: Sequence[int], name: str) -> None:
    if len(drawn) != len(lists.counts):
        raise BadMessage(f"{name} has {len(lists.counts)} rows for {len(drawn)} tokens")
    given = (lists.ids == np.repeat(np.array(drawn, dtype=np.int64), lists.counts)) & (steps > 0)
    missing = np.bincount(lists.owners[given], minlength=len(drawn)) == 0
    if missing.any():
        raise BadMessage(f"tokens has {drawn[int(missing.argmax())]}, which its own row cannot give")


def encode_whole(row: Row) -> pb.WholeRow:
    """A whole row; its probabilities are rounded to float32."""
    ids, probabilities = encode_numbers(row.ids), row.probabilities.astype("<f4").tobytes()
    return pb.WholeRow(ids=ids, probabilities=probabilities, log_probabilities=row.log_probabilities)


def decode_whole(message: pb.WholeRow, name: str, vocabulary_size: int | None) -> Row:
    """A whole row with exactly the float32 probabilities that were sent.

    Raises BadMessage: lengths differ, ids repeat, or it is no distribution.
    """
    ids = decode_ids(message.ids, f"{name}.ids", vocabulary_size)
    if len(message.probabilities) != 4 * len(ids):
        raise BadMessage(f"{name} has {len(ids)} ids but {len(message.probabilities)} bytes of probabilities")
    if len(np.unique(ids)) != len(ids):
        raise BadMessage(f"{name}.ids are not distinct")
    probabilities = np.frombuffer(message.probabilities, dtype="<f4").astype(np.float64)
    if not bool(np.all((probabilities >= 0) & (probabilities <= 1))):  # false for NaN as well
        raise BadMessage(f"{name} has a probability that is not between 0 and 1")
    if abs((total := float(probabilities.sum())) - 1) > SUM_TOLERANCE:
        raise BadMessage(f"{name} sums to {total:.6g}; it must be 1 within {SUM_TOLERANCE}")
    if not message.log_probabilities:
        return Row(ids, probabilities)
    values = _logs(message.log_probabilities, len(ids), name)
    return Row(ids, probabilities, log_probabilities=np.array(values))


def _steps(rows: Sequence[Row]) -> tuple[Lists, Ids]:
    """The ids of rows, and their probabilities in steps. The largest of a row takes what rounding leaves: a whole row
    must sum to one, and a tail must have a step at least. The others depend on nothing else that is listed, and are the
    same in every reply."""
    lists, tails = joined([row.ids for row in rows]), np.array([row.tail for row in rows])
    probabilities = np.concatenate([row.probabilities for row in rows])
    totals = lists.sums(probabilities) + tails
    if not (bool(np.all(np.abs(totals - 1) <= SUM_TOLERANCE)) and not bool((probabilities < 0).any())):
        raise ValueError(f"rows must be distributions; with their tails they sum to {totals.tolist()}")
    steps = np.rint(probabilities * GRID).astype(np.int64)
    left = (GRID - lists.sums(steps)).astype(np.int64)
    left = np.where(tails == 0, left, np.minimum(left - 1, 0))
    if left.any():
        for span, rest in zip(lists.spans, left.tolist(), strict=True):
            if rest:
                steps[span.start + int(steps[span].argmax())] += rest
    return lists, steps


def _leading(lists: Lists) -> NDArray[np.bool_]:
    """Whether an id is among the first of its row, shape (n,)."""
    places = np.arange(len(lists.ids))
    if len(lists.counts) > 1:
        places -= np.array([0, *accumulate(lists.counts[:-1])])[lists.owners]
    return places < LEADING


def encode_samples(samples: Sequence[Sample]) -> target_pb.Samples:
    """Samples, each with its likely ids; raises ValueError if they are too many for one message."""
    if len(samples) > MAX_LISTS:
        raise ValueError(f"{len(samples)} samples; at most {MAX_LISTS} are possible")
    message = target_pb.Samples(
        tokens=[sample.token for sample in samples],
        log_probabilities=[sample.log_probability for sample in samples],
        likely_counts=[len(sample.likely) for sample in samples] if any(sample.likely for sample in samples) else None,
        ranks=[sample.rank for sample in samples] if any(sample.rank for sample in samples) else None,
    )
    _encode_likely([sample.likely for sample in samples], message)
    return message


def decode_samples(message: target_pb.Samples, vocabulary_size: int | None) -> tuple[Sample, ...]:
    """The same samples; raises BadMessage."""
    if not message.ByteSize():
        return ()
    tokens = decode_id_tuple(message.tokens, "samples.tokens", vocabulary_size, MAX_LISTS)
    for name, numbers in (("likely_counts", message.likely_counts), ("ranks", message.ranks)):
        if len(numbers) not in (0, len(tokens)):
            raise BadMessage(f"samples.{name} has {len(numbers)} numbers for {len(tokens)} tokens")
    counts, ranks = tuple(message.likely_counts) or (0,) * len(tokens), tuple(message.ranks) or (0,) * len(tokens)
    values = _logs(message.log_probabilities, len(tokens), "samples")
    likely = _decode_likely(message, counts, "samples", vocabulary_size)
    return tuple(map(Sample, tokens, values, likely, ranks))


def decode_tree(message: target_pb.TokenTree, size: int | None) -> TokenTree:
    tokens = decode_id_tuple(message.tokens, "tree.tokens", size, MAX_NODES)
    check_max(len(message.parents), len(tokens), "tree.parents")
    try:
        if not message.parents:
            return TokenTree.chain(tokens)
        return TokenTree(tokens, tuple(parent - 1 for parent in message.parents))
    except ValueError as error:
        raise BadMessage(f"tree: {error}") from error


def decode_branch(message: drafter_pb.Branch, name: str, size: int | None) -> Branch:
    if not message.number:
        raise BadMessage(f"{name}.number must be at least 1; 0 is none")
    letters = decode_letters(message.letters, f"{name}.letters")
    if not letters:
        raise BadMessage(f"{name}.letters is empty; something must replace what is refused")
    tokens = decode_id_tuple(message.tokens, f"{name}.tokens", size, MOST_DRAFT_TOKENS)
    return Branch(message.number, message.offset, letters, tokens)


def weight_of_node(node: Row | Sample) -> int:
    likely = 5 * len(node.likely)
    if isinstance(node, Sample):
        return 5 + likely
    return len(node.ids) * (2 if node.log_probabilities is None else 3) + likely
