"""The models of a pair, as their services describe them, and the verification method that suits them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from crossdraft.text.letters import Side
from crossdraft.text.pairs import Pair
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.vocabulary import Vocabulary, tokenizer_digest
from crossdraft.types.messages import Description, LeftOut, SamplingDefaults
from crossdraft.types.request import GenerationRequest, Overlap, RequestError
from crossdraft.verification.methods import METHODS, default_method
from crossdraft.verification.noise import KeyedNoise
from crossdraft.verification.walk import Method

# Methods whose output has the target's distribution even if a drafter lies about the rows that it drew from.
SAFE = tuple(method.name for method in METHODS.values() if method.samples)


def tokenization_of(description: Description, side: Side) -> Tokenization:
    """The tokenizer in a service's description of its model.

    Raises ValueError: it cannot be used; the text says why.
    """
    tokenizer, size = description.tokenizer_json, description.vocabulary_size
    try:
        return Tokenization(tokenizer, Vocabulary.build(tokenizer, size, description.controls, description.stops, side))
    except ValueError:
        raise
    except Exception as error:  # the library raises a bare one, and what is read may be anything
        raise ValueError(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, eq=False)
class Models:
    """The models of a target and, unless decoding is plain, of a drafter, as their services describe them."""

    target: Description
    tokenization: Tokenization  # the target's
    drafter: Description | None = None
    pair: Pair | None = None  # None: no drafter

    @staticmethod
    def of(
        target: Description,
        drafter: Description | None = None,
        read: Callable[[Description, Side], Tokenization] = tokenization_of,
        known: Tokenization | None = None,
    ) -> "Models":
        """Those of these services; `known` is the target's tokenizer, if it was read before. Raises as `read`."""
        own = read(target, Side.TARGET) if known is None else known
        pair = None if drafter is None else Pair(own.vocabulary, read(drafter, Side.DRAFTER).vocabulary)
        return Models(target, own, drafter, pair)

    @property
    def context(self) -> int:
        """Tokens that the target can hold."""
        return self.target.context

    @property
    def copies(self) -> bool:
        """Whether the drafter is one that copies bytes of the text."""
        return self.drafter is not None and self.drafter.copies

    @property
    def reads_hidden(self) -> bool:
        """Whether the drafter reads the target's hidden states.

        Raises RequestError: it does, and this target's are not such as it reads, or mean other tokens.
        """
        if self.drafter is None or not self.drafter.hidden_size:
            return False
        own, reads, fault = self.target.hidden_size, self.drafter.hidden_size, ""
        if tokenizer_digest(self.drafter.tokenizer_json) != self.digest:
            fault = "of a target with its own vocabulary, and this target has another one"
        elif own != reads:
            fault = f"of {reads} numbers, and this target {f'has such of {own}' if own else 'sends none'}"
        if fault:
            raise RequestError(f"the drafter {self.drafter.model} reads hidden states {fault}: use another drafter")
        return True

    @cached_property
    def digest(self) -> str:
        """Digest of the target's tokenizer, which an affinity matrix must be made for."""
        return tokenizer_digest(self.target.tokenizer_json)

    @cached_property
    def noises(self) -> tuple[KeyedNoise, KeyedNoise]:
        """The keyed noise of the drafter's and of the target's vocabulary, for audits."""
        vocabulary = self.tokenization.vocabulary
        return KeyedNoise.of(vocabulary if self.pair is None else self.pair.drafter), KeyedNoise.of(vocabulary)

    def prepare(self) -> "Models":
        """Compute now what the first request would have to wait for. Takes up to a second: call it in a thread."""
        if self.pair is not None:
            _ = self.noises, self.pair.target.trie, self.pair.drafter.trie
        return self


def with_defaults(request: GenerationRequest, own: SamplingDefaults) -> GenerationRequest:
    """With the target's own settings in place of what is left out; raises RequestError if they do not go together."""
    options, tokens = own.fill(request.options), own.tokens(request.max_tokens)
    if options.min_tokens > tokens:
        return replace(request, options=options, max_tokens=tokens)  # which raises
    return request.unchecked(options=options, max_tokens=tokens)


def choose_method(request: GenerationRequest, models: Models) -> Method:
    """The method that the request names, or the default.

    Raises RequestError: there is none of this name, or it does not go with the pair or with the request's overlap.
    """
    method = requested_method(request, models)
    if method is not None:
        complaint = fault_of_pair(method, models)
        if complaint:
            raise RequestError(f"method {method.name!r} {complaint}", "method")
        return method
    same = models.pair is not None and models.pair.same_vocabulary
    seeded = request.seed is not None or models.pair is None or bool(request.tree_nodes)
    return default_method(request.options.temperature, seeded, same)


def requested_method(request: GenerationRequest, models: Models | None = None) -> Method | None:
    """The method that a request names, if it names one; of an unknown one the error lists those that `models` can do.

    Raises RequestError: there is no method of this name, or it contradicts another field of the request.
    """
    if request.method is None:
        return None
    if request.method not in METHODS:
        possible = [one for one in METHODS.values() if one.exact or request.allow_inexact]
        names = ", ".join(one.name for one in possible if models is None or not fault_of_pair(one, models))
        choice = "choose one of" if models is None else "this pair of models can do"
        raise RequestError(f"unknown method {request.method!r}; {choice} {names}", "method")
    method = METHODS[request.method]
    name = f"method {method.name!r}"
    drawing = not (request.greedy or isinstance(request.options.temperature, LeftOut))
    seeded = request.seed is not None and drawing
    for wrong, complaint in (
        (
            method.whole_draft and request.overlap is Overlap.ON,
            f"{name} judges a whole draft at once, so nothing can be drafted meanwhile; "
            "use overlap auto or off, or another method",
        ),
        (
            not (method.exact or request.allow_inexact),
            f"the output of {name} does not have the target's distribution; choose an exact method, "
            "or allow it with allow_inexact",
        ),
        (
            bool(request.tree_nodes) and method.whole_draft,
            f"{name} drafts chains; use another method, or leave tree_nodes out",
        ),
        (
            seeded and not method.samples,
            f"the output of {name} depends on timing, so a seed would not repeat it; "
            "use the method 'seeded', or leave the seed out",
        ),
    ):
        if wrong:
            raise RequestError(complaint, "method")
    return method


def fault_of_pair(method: Method, models: Models) -> str:
    """Why a method cannot run on a pair, as the end of a sentence; empty if it can, or there is no drafter."""
    if models.drafter is None or models.pair is None:
        return ""
    if models.drafter.copies and (method.shared_only or method.same_vocabulary):
        return (
            "needs a draft model, and this drafter copies bytes of the text, with certainty; "
            "use 'slem', 'seeded' or another method that takes any token"
        )
    if method.same_vocabulary and not models.pair.same_vocabulary:
        return (
            "needs a drafter with the target's vocabulary, and these differ; "
            "use 'tli', 'slem' or 'seeded' (`crossdraft inspect` shows how they differ)"
        )
    if method.redistributed and models.drafter.affinity != models.digest:
        found = "has one for another target" if models.drafter.affinity else "has none"
        return (
            f"needs a drafter with an affinity matrix for this target, and the drafter {found}; "
            "make one with `crossdraft affinity`, and start the drafter with `serve drafter --affinity FILE`"
        )
    return ""


def without_trust(request: GenerationRequest) -> GenerationRequest:
    """The request with a method that is exact with an untrusted drafter: the one asked for, or the default.

    Raises RequestError: the method asked for needs a trusted drafter, or is refused anyway (`requested_method`).
    """
    method = requested_method(request)
    if method is None:
        default = default_method(request.options.temperature, seeded=True, same_vocabulary=False)
        return replace(request, method=default.name)
    if not method.samples:
        raise RequestError(
            f"with method {method.name!r} a drafter that lies about the distributions that it drew from changes the "
            f"output, and this drafter is not trusted; use {' or '.join(map(repr, SAFE))}, or leave the method out",
            "method",
        )
    return request
