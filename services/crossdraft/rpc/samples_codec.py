"""Protobuf to domain values and back: the target's own draws, several in one message as columns."""

from collections.abc import Sequence

from crossdraft.rpc import codec
from crossdraft.rpc.errors import BadMessage
from crossdraft.v1 import target_pb2 as pb
from crossdraft.verification.exchange import Sample

LOG_TOLERANCE = 1e-3  # nats above 0 that rounding in a model may give


def encode_samples(samples: Sequence[Sample]) -> pb.Samples:
    """Samples with as many likely ids each."""
    beside = [pair for sample in samples for pair in sample.likely]
    return pb.Samples(
        tokens=[sample.token for sample in samples],
        log_probabilities=[sample.log_probability for sample in samples],
        likely=[token for token, _ in beside],
        likely_log_probabilities=[value for _, value in beside],
    )


def decode_samples(message: pb.Samples, vocabulary_size: int | None) -> tuple[Sample, ...]:
    """The same samples; raises BadMessage."""
    tokens = codec.decode_id_tuple(message.tokens, "samples.tokens", vocabulary_size)
    log_probabilities = tuple(message.log_probabilities)
    if len(tokens) != len(log_probabilities):
        raise BadMessage(f"samples has {len(tokens)} tokens but {len(log_probabilities)} log-probabilities")
    likely = codec.decode_id_tuple(message.likely, "samples.likely", vocabulary_size)
    values = tuple(message.likely_log_probabilities)
    if len(likely) != len(values) or len(likely) % max(1, len(tokens)):
        raise BadMessage(f"samples has {len(likely)} likely ids and {len(values)} values for {len(tokens)} tokens")
    for value in (*log_probabilities, *values):
        if not value <= LOG_TOLERANCE:  # false for NaN as well
            raise BadMessage(f"samples has the log-probability {value}; at most 0 is possible")
    each = len(likely) // max(1, len(tokens))
    pairs = tuple(zip(likely, values, strict=True))
    beside = (pairs[place * each : (place + 1) * each] for place in range(len(tokens)))
    return tuple(map(Sample, tokens, log_probabilities, beside))
