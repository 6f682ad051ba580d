"""A request resolved against a target and a drafter: what a session works from."""

import secrets
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from crossdraft.pipeline.appointing import governor_of, most_proposals
from crossdraft.pipeline.assignment import Assignment
from crossdraft.pipeline.auditing import Audit
from crossdraft.pipeline.estimates import Estimates
from crossdraft.pipeline.explanation import Explained
from crossdraft.pipeline.governing import PLAIN, Fixed
from crossdraft.pipeline.output import fault_of_committed
from crossdraft.pipeline.prompts import Prompts, prompts_of
from crossdraft.pipeline.request import GenerationRequest, PromptTooLongError, RequestError
from crossdraft.text.letters import from_bytes
from crossdraft.text.pairing import Pair
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.vocabulary import tokenizer_digest
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.exchange import Description, NoiseKey, OpenDrafter, OpenTarget
from crossdraft.verification.methods import Method, default_method, method_named
from crossdraft.verification.noise import KeyedNoise

NODES_BESIDE_THE_DRAFT = 8
PLAINLY = Fixed(PLAIN)


@dataclass(frozen=True)
class Secrets:
    """All that chance decides in one generation: with the same, the same events lead to the same output."""

    noise: int  # 64 bits: the target's nonce, unless the request has a seed
    audit: int  # 64 bits: the key of audits that have one of their own
    chooser: int  # 128 bits: the seed of the walk's random choices

    @staticmethod
    def drawn() -> "Secrets":
        """New ones, from the system's entropy."""
        return Secrets(secrets.randbits(64), secrets.randbits(64), secrets.randbits(128))


@dataclass(frozen=True, eq=False)
class Models:
    """A target and, unless decoding is plain, a drafter, as they described themselves."""

    target: Description
    tokenization: Tokenization  # the target's
    drafter: Description | None = None
    pair: Pair | None = None  # None: no drafter

    @property
    def context(self) -> int:
        """Tokens that the target can hold."""
        return self.target.context

    @cached_property
    def digest(self) -> str:
        """Of the target's tokenizer: what an affinity matrix must be for."""
        return tokenizer_digest(self.target.tokenizer_json)

    @cached_property
    def noises(self) -> tuple[KeyedNoise, KeyedNoise]:
        """The drafter's and the target's, for audits."""
        vocabulary = self.tokenization.vocabulary
        return KeyedNoise.of(vocabulary if self.pair is None else self.pair.drafter), KeyedNoise.of(vocabulary)

    def prepare(self) -> "Models":
        """Makes at once what requests would have to wait for; it can take a second, so call it in a thread."""
        if self.pair is not None:
            self.pair.sort()
            _ = self.noises
        return self


def resolve(
    request: GenerationRequest,
    models: Models,
    drawn: Secrets | None = None,
    targets: int = 1,
    before: Estimates | None = None,
    follows: bool = False,
) -> Assignment:
    """What the session works from.

    Args:
        request: as the user wrote it.
        models: what target and drafter said of themselves.
        drawn: what chance decides; None: drawn now.
        targets: addresses of the target.
        before: what a governor learnt of the same services with the same method.
        follows: another output is getting to know them now.

    Raises:
        RequestError: method, vocabularies, affinity, audit or lengths do not go together.
    """
    drawn = drawn or Secrets.drawn()
    method = choose_method(request, models)
    prompts = _prompts(request, models)
    noise = NoiseKey(drawn.noise if request.seed is None else request.seed, request.choice)
    pair = models.pair or Pair(models.tokenization.vocabulary, models.tokenization.vocabulary)
    audit = _audit(models, method, noise, drawn) if request.audit else None
    opening = _open_drafter(request, models, prompts, method, audit, noise)
    targets = min(2, max(1, targets)) if request.speculation else 1  # where there is none now, one may come
    governor = PLAINLY if opening is None else governor_of(request, method, targets, before, follows)
    assignment = Assignment(
        pair=pair,
        method=method,
        chooser=RandomChooser(np.random.default_rng(drawn.chooser)),
        encode=models.tokenization.encode_continuation,
        open_target=_open_target(request, prompts, noise),
        open_drafter=opening,
        governor=Explained(governor) if request.explain else governor,
        max_tokens=request.max_tokens,
        context=models.context,
        ignore_end=request.ignore_eos,
        stop=tuple(from_bytes(text.encode()) for text in request.stop),
        targets=targets,
        paths=request.paths,
        tree_budget=request.paths * most_proposals(request) + NODES_BESIDE_THE_DRAFT,
        committed=request.committed,
        audit=audit,
    )
    return _checked(assignment)


def _checked(assignment: Assignment) -> Assignment:
    """The same; raises RequestError if the output cannot go on after what is committed already."""
    fault = fault_of_committed(assignment)
    if fault:
        raise RequestError(fault)
    return assignment


def choose_method(request: GenerationRequest, models: Models) -> Method:
    """The method asked for, or the default.

    Raises:
        RequestError: the pair cannot do it.
    """
    if request.method is not None:
        method = method_named(request.method)
        complaint = fault_of_pair(method, models)
        if complaint:
            raise RequestError(f"method {method.name!r} {complaint}", "method")
        return method
    same = models.pair is not None and models.pair.same_vocabulary
    seeded = request.seed is not None or models.pair is None or request.logprobs is not None
    return default_method(request.options.temperature, seeded, same)


def fault_of_pair(method: Method, models: Models) -> str:
    """Why a method cannot run on a pair, as the end of a sentence; empty if it can, or there is no drafter."""
    if models.drafter is None or models.pair is None:
        return ""
    if models.drafter.copies and (method.shared_only or method.same_vocabulary or method.redistributed):
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


def _prompts(request: GenerationRequest, models: Models) -> Prompts:
    prompts = prompts_of(request.prompt, models.target, models.tokenization, models.drafter)
    if not prompts.target:
        raise RequestError("the prompt has no tokens; give at least one character that the tokenizer keeps")
    if len(prompts.target) >= models.context:
        raise PromptTooLongError(
            f"the prompt has {len(prompts.target)} tokens, and the target's context holds {models.context} "
            "with at least one of them generated; shorten the prompt"
        )
    size = models.tokenization.vocabulary.size
    for name, ids in (
        ("logit_bias", [token for token, _ in request.options.logit_bias]),
        ("committed", request.committed),
    ):
        wrong = [token for token in ids if not 0 <= token < size]
        if wrong:
            raise RequestError(f"{name} names id {wrong[0]}, and the target's ids are 0 to {size - 1}", name)
    return prompts


def _audit(models: Models, method: Method, noise: NoiseKey, drawn: Secrets) -> Audit:
    """Where the method keys the drafter's draws, that key; else one of its own, so that drafts stay independent."""
    if models.pair is None:
        raise RequestError("there is no drafter whose draws could be audited: leave out audit (--audit)")
    if method.keyed:
        return Audit(noise, False, *models.noises)
    return Audit(NoiseKey(drawn.audit), True, *models.noises)


def _open_target(request: GenerationRequest, prompts: Prompts, noise: NoiseKey) -> OpenTarget:
    likely = request.logprobs or 0
    return OpenTarget(prompts.target, request.options, noise, request.head, likely, ignore_stops=request.ignore_eos)


def _open_drafter(
    request: GenerationRequest,
    models: Models,
    prompts: Prompts,
    method: Method,
    audit: Audit | None,
    noise: NoiseKey,
) -> OpenDrafter | None:
    if models.pair is None:
        return None
    shared = method.shared_only or method.redistributed
    allowed = models.pair.shared_drafter_ids if shared else None
    if allowed is not None and not len(allowed):
        return None  # T∩D is empty: nothing could be proposed
    temperature = request.drafter_temperature
    options = replace(request.options, repetition_penalty=1.0, presence_penalty=0.0, logit_bias=())
    if temperature is not None:
        options = replace(options, temperature=temperature)
    if audit is not None:
        noise = audit.key
    return OpenDrafter(
        prompt=prompts.drafter,
        options=options,
        noise=noise if method.keyed or audit is not None else None,
        row_width=request.row_width if method.drafter_rows or audit is not None else 0,
        allowed=allowed,
        redistribute=models.digest if method.redistributed else "",
        audited=audit is not None and audit.each_epoch,
        templated=prompts.templated,
    )
