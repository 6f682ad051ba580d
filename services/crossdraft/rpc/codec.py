"""Protobuf to domain values and back: what both services have in common.

Decoding checks everything that a value must fulfil, and raises `BadMessage` with a text that names the field.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from crossdraft.rpc.errors import BadMessage
from crossdraft.text.letters import FIRST_CONTROL, Letters, Role, Side
from crossdraft.v1 import common_pb2 as pb
from crossdraft.verification.exchange import Description, NoiseKey, SamplingOptions
from crossdraft.verification.rows import Ids, Row

SUM_TOLERANCE = 1e-4  # of a row's sum; float32 rounding of any row stays below it
FIRST_OF_SIDES = min(side.value for side in Side)
ROLES = frozenset(role.value for role in Role)


@dataclass(frozen=True)
class Opened:
    """The session is open."""

    fingerprint: str  # of the model that is served


def encode_letters(letters: Letters) -> bytes:
    """Letters as the UTF-8 of their code points."""
    return letters.encode()


def decode_letters(raw: bytes, name: str) -> Letters:
    """Letters of a field.

    Raises:
        BadMessage: not UTF-8, or a code point that is no letter.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise BadMessage(f"{name} is not the UTF-8 of letters' code points: {error}") from error
    for letter in set(text):
        point = ord(letter)
        if not (point < FIRST_CONTROL or point in ROLES or point >= FIRST_OF_SIDES):
            raise BadMessage(f"{name} has U+{point:04X}, which is no letter; send each byte as U+0000..U+00FF")
    return Letters(text)


def decode_ids(field: Sequence[int], name: str, vocabulary_size: int | None) -> Ids:
    """Token ids, shape (n,), int64; raises BadMessage if one is outside the vocabulary (where its size is known)."""
    ids = np.fromiter(field, dtype=np.int64, count=len(field))
    if vocabulary_size is not None and ids.size and int(ids.max()) >= vocabulary_size:
        raise BadMessage(f"{name} has the id {int(ids.max())}, but the vocabulary has {vocabulary_size} ids")
    return ids


def decode_id_tuple(field: Sequence[int], name: str, vocabulary_size: int | None) -> tuple[int, ...]:
    """The same as a tuple."""
    return tuple(decode_ids(field, name, vocabulary_size).tolist())


def encode_row(row: Row) -> pb.Row:
    """A row; probabilities are rounded to float32."""
    return pb.Row(ids=row.ids.tolist(), probabilities=row.probabilities.tolist(), tail=row.tail)


def decode_row(message: pb.Row, name: str, vocabulary_size: int | None) -> Row:
    """A row with exactly the float32 probabilities that were sent.

    Raises:
        BadMessage: lengths differ, ids repeat, or it is no distribution.
    """
    ids = decode_ids(message.ids, f"{name}.ids", vocabulary_size)
    count = len(message.probabilities)
    probabilities = np.fromiter(message.probabilities, dtype=np.float64, count=count)
    if len(ids) != count:
        raise BadMessage(f"{name} has {len(ids)} ids but {count} probabilities")
    if len(np.unique(ids)) != len(ids):
        raise BadMessage(f"{name}.ids are not distinct")
    check_distribution(np.append(probabilities, message.tail), name)
    return Row(ids, probabilities, message.tail)


def check_distribution(masses: np.ndarray[tuple[int], np.dtype[np.float64]], name: str) -> None:
    """Raises BadMessage unless all masses are in [0, 1] and sum to one within SUM_TOLERANCE."""
    if not bool(np.all((masses >= 0) & (masses <= 1))):  # false for NaN as well
        raise BadMessage(f"{name} has a probability that is not between 0 and 1")
    total = float(masses.sum())
    if abs(total - 1) > SUM_TOLERANCE:
        raise BadMessage(f"{name} sums to {total:.6g} with its tail; it must be 1 within {SUM_TOLERANCE}")


def check_seconds(seconds: float) -> float:
    """A duration; raises BadMessage unless it is finite and not negative."""
    if not (math.isfinite(seconds) and seconds >= 0):
        raise BadMessage(f"seconds is {seconds}; it must be 0 or more")
    return seconds


def encode_options(options: SamplingOptions) -> pb.SamplingOptions:
    """Sampling options, in full: no field is left to its default."""
    return pb.SamplingOptions(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        logit_bias=[pb.LogitBias(id=token, bias=bias) for token, bias in options.logit_bias],
    )


def decode_options(message: pb.SamplingOptions, vocabulary_size: int | None) -> SamplingOptions:
    """Sampling options; raises BadMessage when one is out of its range."""
    decode_ids([bias.id for bias in message.logit_bias], "options.logit_bias", vocabulary_size)
    try:
        return SamplingOptions(
            temperature=message.temperature if message.HasField("temperature") else 1.0,
            top_k=message.top_k,
            top_p=message.top_p if message.HasField("top_p") else 1.0,
            min_p=message.min_p,
            repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
            presence_penalty=message.presence_penalty,
            logit_bias=tuple((bias.id, bias.bias) for bias in message.logit_bias),
        )
    except ValueError as error:
        raise BadMessage(f"options: {error}") from error


def encode_noise(noise: NoiseKey | None) -> pb.NoiseKey | None:
    """A noise key, or nothing."""
    return None if noise is None else pb.NoiseKey(seed=noise.seed, choice=noise.choice)


def decode_noise(message: pb.NoiseKey) -> NoiseKey:
    """A noise key that is set."""
    return NoiseKey(message.seed, message.choice)


def encode_id_list(ids: Ids | None) -> pb.IdList | None:
    """A list of ids, which may be empty, or nothing."""
    return None if ids is None else pb.IdList(ids=ids.tolist())


def encode_id_lists(lists: Iterable[Ids]) -> list[pb.IdList]:
    """One list of ids a node."""
    return [pb.IdList(ids=ids.tolist()) for ids in lists]


def encode_description(description: Description) -> pb.Description:
    """What a service says of its model."""
    return pb.Description(
        model=description.model,
        tokenizer_json=description.tokenizer_json,
        controls=[pb.Control(id=token, role=role) for token, role in description.controls],
        stops=description.stops,
        vocabulary_size=description.vocabulary_size,
        context=description.context,
        fingerprint=description.fingerprint,
        affinity=description.affinity,
        copies=description.copies,
    )


def decode_description(message: pb.Description) -> Description:
    """What a service says of its model.

    Raises:
        BadMessage: no ids, no context, ids outside the vocabulary, or a role that is not known.
    """
    if not (message.vocabulary_size and message.context and message.tokenizer_json and message.fingerprint):
        raise BadMessage("a description needs vocabulary_size, context, tokenizer_json and fingerprint")
    for control in message.controls:
        if control.role not in Role.__members__:
            raise BadMessage(f"controls has the role {control.role!r}; known are {', '.join(Role.__members__)}")
    size = message.vocabulary_size
    controls = decode_id_tuple([control.id for control in message.controls], "controls", size)
    return Description(
        model=message.model,
        tokenizer_json=message.tokenizer_json,
        controls=tuple(zip(controls, (control.role for control in message.controls), strict=True)),
        stops=decode_id_tuple(message.stops, "stops", size),
        vocabulary_size=size,
        context=message.context,
        fingerprint=message.fingerprint,
        affinity=message.affinity,
        copies=message.copies,
    )
