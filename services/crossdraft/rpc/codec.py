"""Protobuf to domain values and back: what both services have in common.

Decoding checks everything that a value must fulfil, and raises `BadMessage` with a text that names the field.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from crossdraft.rpc.bounds import MOST_BIASES, MOST_IDS, check_most
from crossdraft.rpc.errors import BadMessage
from crossdraft.text.chat_template import ChatTemplate
from crossdraft.text.letters import FIRST_CONTROL, Letters, Role, Side
from crossdraft.v1 import common_pb2 as pb
from crossdraft.verification.exchange import Description, NoiseKey, SamplingOptions

MICRO = 1_000_000  # microseconds in a second
LONGEST = 2**32 - 1  # microseconds
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


def decode_id_tuple(field: Sequence[int], name: str, vocabulary_size: int | None) -> tuple[int, ...]:
    """A few token ids; raises BadMessage if one is outside the vocabulary (where its size is known)."""
    check_most(len(field), MOST_IDS, name)
    ids = tuple(field)
    if vocabulary_size is not None and ids and max(ids) >= vocabulary_size:
        raise BadMessage(f"{name} has the id {max(ids)}, but the vocabulary has {vocabulary_size} ids")
    return ids


def encode_seconds(seconds: float) -> int:
    """A duration in microseconds, at most the 71 minutes that a field holds; raises ValueError if it is none."""
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"seconds is {seconds}; it must be 0 or more")
    return min(round(seconds * MICRO), LONGEST)


def decode_seconds(microseconds: int) -> float:
    """A duration in seconds."""
    return microseconds / MICRO


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
    check_most(len(message.logit_bias), MOST_BIASES, "options.logit_bias")
    decode_id_tuple([bias.id for bias in message.logit_bias], "options.logit_bias", vocabulary_size)
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
        chat_template=_encode_template(description.chat_template),
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
        chat_template=_decode_template(message.chat_template) if message.HasField("chat_template") else None,
    )


def _encode_template(template: ChatTemplate | None) -> pb.ChatTemplate | None:
    return None if template is None else pb.ChatTemplate(source=template.source, tokens=dict(template.tokens))


def _decode_template(message: pb.ChatTemplate) -> ChatTemplate:
    if not message.source:
        raise BadMessage("chat_template has no source; leave it unset where there is none")
    return ChatTemplate(message.source, tuple(sorted(message.tokens.items())))
