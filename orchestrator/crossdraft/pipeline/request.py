"""A request as a user writes it, and its resolution against a target and a drafter."""

import secrets
from dataclasses import dataclass, field, replace

import numpy as np

from crossdraft.pipeline.assignment import Assignment
from crossdraft.text.letters import Letters, from_bytes
from crossdraft.text.pairing import Pair
from crossdraft.text.tokenization import Tokenization
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.exchange import NoiseKey, OpenDrafter, OpenTarget, SamplingOptions
from crossdraft.verification.methods import Method, default_method, method_named

MOST_PROPOSALS = 64
WIDEST = 4096  # ids of a row on the wire; wider ones cannot be rounded to a grid of 2^-24 without bias
NODES_BESIDE_THE_DRAFT = 8


class RequestError(ValueError):
    """The request cannot be served; the text says what to change."""


@dataclass(frozen=True)
class GenerationRequest:
    """One output for one prompt."""

    prompt: str
    method: str | None = None  # None: the default for temperature, seed and pair
    k: int = 5  # proposals in a round
    max_tokens: int = 128
    options: SamplingOptions = field(default_factory=SamplingOptions)
    drafter_temperature: float | None = None  # None: the target's
    row_width: int = 64  # ids of a proposal's row; the drafter draws among them
    head: int = 64  # ids of a target row that travel unasked
    seed: int | None = None
    choice: int = 0  # index among the n outputs of one prompt
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checks = (
            (bool(self.prompt), "the prompt is empty; give at least one character"),
            (1 <= self.k <= MOST_PROPOSALS, f"k must be between 1 and {MOST_PROPOSALS}, got {self.k}"),
            (self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}"),
            (1 <= self.row_width <= WIDEST, f"row_width must be between 1 and {WIDEST}, got {self.row_width}"),
            (1 <= self.head <= WIDEST, f"head must be between 1 and {WIDEST}, got {self.head}"),
            (0 <= self.choice < 2**32, f"choice must be between 0 and 2**32 - 1, got {self.choice}"),
            (
                self.drafter_temperature is None or 0 <= self.drafter_temperature < float("inf"),
                f"drafter_temperature must be 0 or more, got {self.drafter_temperature}",
            ),
            (self.seed is None or 0 <= self.seed < 2**64, f"seed must be between 0 and 2**64 - 1, got {self.seed}"),
            (all(self.stop), "a stop string must not be empty"),
        )
        for holds, complaint in checks:
            if not holds:
                raise RequestError(complaint)


@dataclass(frozen=True)
class Models:
    """A target and, unless decoding is plain, a drafter, as they described themselves."""

    tokenization: Tokenization  # the target's
    context: int  # tokens that the target can hold
    pair: Pair | None  # None: no drafter


def resolve(request: GenerationRequest, models: Models) -> Assignment:
    """What the session works from.

    Raises:
        RequestError: method, seed, vocabularies or lengths do not go together.
    """
    method = choose_method(request, models)
    prompt = _prompt_ids(request, models)
    noise = NoiseKey(secrets.randbits(64) if request.seed is None else request.seed, request.choice)
    pair = models.pair or Pair(models.tokenization.vocabulary, models.tokenization.vocabulary)
    return Assignment(
        pair=pair,
        method=method,
        chooser=RandomChooser(np.random.default_rng()),
        encode=models.tokenization.encode_continuation,
        open_target=OpenTarget(prompt, request.options, noise if method.samples else None, request.head),
        open_drafter=_open_drafter(request, models, method, noise),
        proposals=request.k,
        max_tokens=request.max_tokens,
        context=models.context,
        ignore_end=request.ignore_eos,
        stop=tuple(from_bytes(text.encode()) for text in request.stop),
        tree_budget=2 * request.k + NODES_BESIDE_THE_DRAFT,
    )


def choose_method(request: GenerationRequest, models: Models) -> Method:
    """The method asked for, or the default; refused where it cannot do what is asked."""
    greedy = request.options.temperature == 0
    seeded = request.seed is not None
    same = models.pair is not None and models.pair.same_vocabulary
    if request.method is None:
        return default_method(request.options.temperature, seeded or models.pair is None, same)
    try:
        method = method_named(request.method)
    except ValueError as error:
        raise RequestError(str(error)) from error
    if method.same_vocabulary and models.pair is not None and not same:
        raise RequestError(
            f"method {method.name!r} needs a drafter with the target's vocabulary, and these differ; "
            "use 'tli', 'slem' or 'seeded' (`crossdraft inspect` shows how they differ)"
        )
    if seeded and not greedy and not method.seedable:
        raise RequestError(
            f"the output of method {method.name!r} depends on timing, so a seed would not repeat it; "
            "use --method seeded, or leave the seed out"
        )
    return method


def _prompt_ids(request: GenerationRequest, models: Models) -> tuple[int, ...]:
    prompt = models.tokenization.encode_prompt(request.prompt)
    if not prompt:
        raise RequestError("the prompt has no tokens; give at least one character that the tokenizer keeps")
    if len(prompt) >= models.context:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, and the target's context holds {models.context} "
            "with at least one of them generated; shorten the prompt"
        )
    size = models.tokenization.vocabulary.size
    wrong = [token for token, _ in request.options.logit_bias if not 0 <= token < size]
    if wrong:
        raise RequestError(f"logit_bias names id {wrong[0]}, and the target's ids are 0 to {size - 1}")
    return prompt


def _open_drafter(request: GenerationRequest, models: Models, method: Method, noise: NoiseKey) -> OpenDrafter | None:
    if models.pair is None:
        return None
    allowed = models.pair.shared_drafter_ids if method.shared_only else None
    if allowed is not None and not len(allowed):
        return None  # T∩D is empty: nothing could be proposed
    temperature = request.drafter_temperature
    options = replace(request.options, repetition_penalty=1.0, presence_penalty=0.0, logit_bias=())
    if temperature is not None:
        options = replace(options, temperature=temperature)
    return OpenDrafter(
        prompt=Letters(from_bytes(request.prompt.encode())),
        options=options,
        noise=noise if method.keyed else None,
        row_width=request.row_width if method.drafter_rows else 0,
        allowed=allowed,
    )
