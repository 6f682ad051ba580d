"""Resolves a request against a target and a drafter into the assignment of a session."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from crossdraft.session.assignment import Assignment, Audit, Secrets
from crossdraft.session.output import fault_of_committed
from crossdraft.speculation.arms import MOST_AHEAD, TREES, arms_for
from crossdraft.speculation.choice import PLAIN, Choice, Controller, Fixed, lock_step
from crossdraft.speculation.controller import TargetController
from crossdraft.text.chat_template import ChatTemplateError
from crossdraft.text.letters import Letters, Side, from_bytes
from crossdraft.text.pairs import Pair
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.vocabulary import Vocabulary, tokenizer_digest
from crossdraft.types.messages import (
    MOST_DRAFT_TOKENS,
    Description,
    LeftOut,
    NoiseKey,
    OpenDrafter,
    OpenTarget,
    SamplingDefaults,
    SamplingOptions,
)
from crossdraft.types.output import Written
from crossdraft.types.request import (
    Asked,
    Chat,
    GenerationRequest,
    Overlap,
    Prompt,
    PromptTooLongError,
    RequestError,
    plain,
    rendered,
)
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.methods import METHODS, default_method
from crossdraft.verification.noise import KeyedNoise
from crossdraft.verification.walk import Method


def tokenization_of(description: Description, side: Side) -> Tokenization:
    """The tokenizer in a service's description of its model.

    Raises:
        ValueError: it cannot be used; the text says why.
    """
    tokenizer, size = description.tokenizer_json, description.vocabulary_size
    try:
        return Tokenization(tokenizer, Vocabulary.build(tokenizer, size, description.controls, description.stops, side))
    except ValueError:
        raise
    except Exception as error:  # the library raises a bare one, and what is read may be anything
        raise ValueError(f"{type(error).__name__}: {error}") from error


SHARE_NOTHING = "the two vocabularies share no token, and this method drafts no others"
NODES_BESIDE_THE_DRAFT = 8  # of a pass's tree, beyond those for each path's draft tokens
# Methods whose output has the target's distribution even if a drafter lies about the rows that it drew from.
SAFE = tuple(method.name for method in METHODS.values() if not method.trusting)


@dataclass(frozen=True, eq=False)
class Models:
    """The models of a target and, unless decoding is plain, of a drafter, as their services describe them."""

    target: Description
    tokenization: Tokenization  # the target's
    drafter: Description | None = None
    pair: Pair | None = None  # None: no drafter

    @property
    def context(self) -> int:
        """Tokens that the target can hold."""
        return self.target.context

    @property
    def copies(self) -> bool:
        """Whether the drafter is one that copies bytes of the text."""
        return self.drafter is not None and self.drafter.copies

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
            self.pair.sort()
            _ = self.noises
        return self


def resolve(
    request: GenerationRequest,
    models: Models,
    drawn: Secrets | None = None,
    targets: int = 1,
    shared: TargetController | None = None,
    target_seconds: float = Assignment.target_seconds,
    prompts: "Prompts | None" = None,
    sampling: SamplingOptions | None = None,
) -> Assignment:
    """The assignment of a session.

    Args:
        request: as the user wrote it.
        models: of target and drafter.
        drawn: the random seeds; None: drawn now.
        targets: number of the target's addresses.
        shared: decides for all outputs on these services; None: this one is alone.
        target_seconds: without any target, after which the output fails.
        prompts: of the request, if they are there already (`prompts_of`).
        sampling: likewise its options (`sampling_of`).

    Raises:
        RequestError: method, vocabularies, affinity, audit or lengths do not go together.
    """
    drawn, request = drawn or Secrets.drawn(), with_defaults(request, models.target.defaults)
    method = choose_method(request, models)
    prompts = prompts or prompts_of(request, models)
    sampling = sampling or sampling_of(request, models)
    noise = NoiseKey(drawn.noise if request.seed is None else request.seed, request.choice)
    pair = models.pair or Pair(models.tokenization.vocabulary, models.tokenization.vocabulary)
    audit = _audit(models, method, noise, drawn) if request.audit else None
    opening = _open_drafter(request, models, prompts, method, audit, noise)
    targets = min(2, max(1, targets)) if request.speculation else 1  # where there is none now, one may come
    controller = Fixed(PLAIN) if opening is None else controller_of(request, method, targets, shared, models.copies)
    assignment = Assignment(
        pair=pair,
        method=method,
        chooser=RandomChooser(np.random.default_rng(drawn.chooser)),
        encode=models.tokenization.encode_continuation,
        open_target=_open_target(request, sampling, prompts, noise),
        open_drafter=opening,
        controller=controller,
        context=models.context,
        target_seconds=target_seconds,
        targets=targets,
        audit=audit,
        no_drafter=SHARE_NOTHING if opening is None and models.pair is not None else Assignment.no_drafter,
        **_as_asked(request, models.copies),
    )
    if fault := fault_of_committed(assignment):
        raise RequestError(fault)
    return assignment


def with_defaults(request: GenerationRequest, own: SamplingDefaults) -> GenerationRequest:
    """With the target's own settings in place of what is left out; raises RequestError if they do not go together."""
    options, tokens = own.fill(request.options), own.tokens(request.max_tokens)
    same = options is request.options and tokens is request.max_tokens
    return request if same else replace(request, options=options, max_tokens=tokens)


def _as_asked(request: GenerationRequest, copies: bool) -> dict[str, Any]:
    """Fields of an assignment that the request alone decides."""
    return {
        "explain": request.explain,
        "max_tokens": request.max_tokens,
        "ignore_end": request.ignore_eos,
        "stop_ids": request.stop_token_ids,
        "stop": tuple(from_bytes(text.encode()) for text in request.stop),
        "keep_stop": request.include_stop_str_in_output,
        "prompt_logprobs": request.prompt_logprobs,
        "paths": request.paths,
        "tree_budget": request.paths * most_draft_tokens(request, copies) + NODES_BESIDE_THE_DRAFT,
        "committed": request.committed,
    }


def controller_of(
    request: GenerationRequest, method: Method, targets: int, shared: TargetController | None, copies: bool
) -> Controller:
    """The controller that a request asks for: one that always chooses the same, or its part of the shared one."""
    match request.overlap:
        case Overlap.OFF:
            nodes = max(_tree_sizes(request, method, copies), default=0) if request.tree_nodes else 0
            return lock_step(request.num_speculative_tokens, nodes)
        case Overlap.ON:
            return Fixed(_always_overlapped(request))
    arms = arms_for(
        most_draft_tokens(request, copies),
        request.min_draft_tokens,
        _tree_sizes(request, method, copies),
        method.whole_draft or copies,  # what is copied is there at once: nothing is drafted meanwhile
        copies,
        (request.branches or 0, request.branch_width or 1),
        targets,
    )
    kind = method.name, request.options.temperature, request.drafter_temperature
    return (shared or TargetController()).output(kind, arms, targets)


def _tree_sizes(request: GenerationRequest, method: Method, copies: bool) -> tuple[int, ...]:
    """Nodes of draft trees that may be used; an audit recomputes the draws of chains only, and copies are chains."""
    if not method.samples or request.audit or copies or request.tree_nodes == 0:
        return ()
    return tuple(nodes for _, nodes in TREES) if request.tree_nodes is None else (request.tree_nodes,)


def most_draft_tokens(request: GenerationRequest, copies: bool = False) -> int:
    """Most draft tokens beyond those revealed (`Choice.max_draft_tokens`); those of a drafter that copies are bytes."""
    if request.max_draft_tokens is not None:
        return request.max_draft_tokens
    in_round = request.num_speculative_tokens
    controlled = MOST_DRAFT_TOKENS if copies else MOST_AHEAD
    usual = {Overlap.OFF: in_round, Overlap.ON: 2 * in_round, Overlap.AUTO: controlled}[request.overlap]
    return min(MOST_DRAFT_TOKENS, max(usual, request.min_draft_tokens or 0))


def _always_overlapped(request: GenerationRequest) -> Choice:
    """A pass waits for num_speculative_tokens draft tokens, and as many again are drafted meanwhile, in two replies.

    If the request sets one of max_draft_tokens and min_draft_tokens, each draft token is a reply: the drafter may be
    slow beside a pass.
    """
    window = most_draft_tokens(request)
    wait = min(request.num_speculative_tokens, window) if request.min_draft_tokens is None else request.min_draft_tokens
    usual = request.max_draft_tokens is None and request.min_draft_tokens is None
    return Choice(
        max_draft_tokens=window,
        min_draft_tokens=wait,
        chunk=(wait + 1) // 2 if usual else 1,
        branch_depth=request.branches or 0,
        branch_width=request.branch_width or 1,
        speculate=request.speculation,
        reason="overlapped, as asked for",
    )


def choose_method(request: GenerationRequest, models: Models) -> Method:
    """The method that the request names, or the default.

    Raises:
        RequestError: there is none of this name, or it does not go with the pair or with the request's overlap.
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

    Raises:
        RequestError: there is no method of this name, or it contradicts another field of the request.
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
            bool(request.tree_nodes) and not method.samples,
            f"{name} drafts chains; use 'slem' or 'seeded', or leave tree_nodes out",
        ),
        (
            seeded and not method.seedable,
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


def without_trust(request: GenerationRequest) -> GenerationRequest:
    """The request with a method that is exact with an untrusted drafter: the one asked for, or the default.

    Raises:
        RequestError: the method asked for needs a trusted drafter, or is refused anyway (`requested_method`).
    """
    method = requested_method(request)
    if method is None:
        default = default_method(request.options.temperature, seeded=True, same_vocabulary=False)
        return replace(request, method=default.name)
    if method.trusting:
        raise RequestError(
            f"with method {method.name!r} a drafter that lies about the distributions that it drew from "
            f"changes the output, "
            f"and this drafter is not trusted; use {' or '.join(map(repr, SAFE))}, or leave the method out",
            "method",
        )
    return request


@dataclass(frozen=True)
class Prompts:
    """One prompt as each model reads it."""

    target: tuple[int, ...]  # its ids
    drafter: Letters
    templated: bool = False  # the drafter's is rendered with its own chat template


def _check_ids(request: GenerationRequest, models: Models) -> None:
    size = models.tokenization.vocabulary.size
    for name, ids in (
        ("logit_bias", [token for token, _ in request.options.logit_bias]),
        ("allowed_token_ids", request.options.allowed_token_ids),
        ("stop_token_ids", request.stop_token_ids),
        ("bad_word_ids", [token for word in request.options.bad_word_ids for token in word]),
        ("committed", request.committed),
    ):
        if ids and not 0 <= min(ids) <= max(ids) < size:
            wrong = next(token for token in ids if not 0 <= token < size)
            raise RequestError(f"{name} names id {wrong}, and the target's ids are 0 to {size - 1}", name)


def sampling_of(request: GenerationRequest, models: Models) -> SamplingOptions:
    """The options with the ids that only the tokenizer knows. Takes as long as there are many: call it in a thread.

    Raises:
        RequestError: no id is left that may be drawn, or one is not the target's.
    """
    _check_ids(request, models)
    tokenization, options = models.tokenization, models.target.defaults.fill(request.options)
    words = [ids for word in request.bad_words for ids in _bad_word_ids(word, tokenization)]
    ends = sorted(tokenization.vocabulary.stops.union(request.stop_token_ids)) if options.min_tokens else ()
    allowed = frozenset(options.allowed_token_ids)
    options = replace(
        options,
        bad_word_ids=(*options.bad_word_ids, *words),
        end_ids=tuple(ends),
        allowed_token_ids=tuple(dict.fromkeys(options.allowed_token_ids)),
    )
    banned = {*ends, *(word[-1] for word in options.bad_word_ids)}
    if (allowed <= banned) if allowed else (tokenization.vocabulary.size <= len(banned)):
        text = "allowed_token_ids, bad_words and min_tokens may leave no id to draw: allow one more"
        raise RequestError(text, "allowed_token_ids")
    return options


def _bad_word_ids(word: str, tokenization: Tokenization) -> Iterator[tuple[int, ...]]:
    """A word at the beginning and in the middle of a text, as vLLM writes it."""
    plain, spaced = (_encoded(tokenization, space + word.lstrip(), False, "bad_words") for space in ("", " "))
    if not plain:
        raise RequestError(f"the bad word {word!r} has no tokens; leave it out", "bad_words")
    yield plain
    if len(spaced) == len(plain) and spaced[0] != plain[0]:
        yield spaced


def _audit(models: Models, method: Method, noise: NoiseKey, drawn: Secrets) -> Audit:
    """Audits use the key of the drafter's draws if the method has one, else one of their own, so that drafts stay
    independent of the target's noise."""
    if models.pair is None:
        raise RequestError("audit needs a drafter: give one, or leave out audit")
    if method.keyed:
        return Audit(noise, False, *models.noises)
    return Audit(NoiseKey(drawn.audit), True, *models.noises)


def _open_target(
    request: GenerationRequest, sampling: SamplingOptions, prompts: Prompts, noise: NoiseKey
) -> OpenTarget:
    return OpenTarget(
        prompts.target, sampling, noise, request.head, request.logprobs, request.ignore_eos, request.stop_token_ids
    )


def _open_drafter(
    request: GenerationRequest, models: Models, prompts: Prompts, method: Method, audit: Audit | None, noise: NoiseKey
) -> OpenDrafter | None:
    if models.pair is None or not request.max_tokens:
        return None
    shared = method.shared_only or method.redistributed
    allowed = models.pair.shared_drafter_ids if shared else None
    if allowed is not None and not len(allowed):
        return None  # T∩D is empty: nothing could be proposed
    temperature = request.drafter_temperature
    options = request.options.of_drafter
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
        scope=request.cache_salt,
    )


def prompts_of(request: GenerationRequest, models: Models) -> Prompts:
    """Encode the prompt for both models. Takes as long as it is large, unless it cannot fit: call it in a thread.

    Raises:
        RequestError: it has no token, an id that the target does not have, or a chat that its template refuses.
        PromptTooLongError: it leaves no room in the target's context; a text that cannot fit is not tokenized.
    """
    request = with_defaults(request, models.target.defaults)
    prompt, whole = request.prompt, request.truncate_prompt_tokens is None
    if isinstance(prompt, tuple) and whole:
        _check_room(len(prompt), request, models)
    ids = _target_ids(prompt, models, request.add_special_tokens, whole)
    if not ids:
        raise RequestError("the prompt has no tokens; give at least one character that the tokenizer keeps", "prompt")
    if not whole and len(ids) > (most := _kept(request, models)):
        begin = models.tokenization.begin[:most] if isinstance(prompt, str) and request.add_special_tokens else ()
        ids = prompt = (*begin, *ids[len(ids) - most + len(begin) :])
    _check_room(len(ids), request, models)
    match prompt:
        case str():
            return Prompts(ids, from_bytes(prompt.encode()))
        case Chat():
            return Prompts(ids, *_chat_letters(prompt, models.drafter))
    return Prompts(ids, models.tokenization.prompt_letters(ids))


def _kept(request: GenerationRequest, models: Models) -> int:
    """How many of the last tokens are read, as in vLLM: of a text, with those that every prompt begins with."""
    most, context = request.truncate_prompt_tokens or 0, models.context
    if most > context:
        raise RequestError(
            f"truncate_prompt_tokens value ({most}) is greater than max_model_len ({context}); "
            "select a smaller truncation size",
            "truncate_prompt_tokens",
        )
    if most >= 0:
        return most
    return context - (request.max_tokens if request.max_tokens < context else 1)


def written(what: Asked, models: Models, special: bool = True) -> Written:
    """How the target's tokenizer writes a prompt, or what is read of a request's. Call it in a thread, as `prompts_of`,
    which raises the same. Unless `special`, a text gets no special tokens that a prompt begins with."""
    ids = prompts_of(what, models).target if isinstance(what, GenerationRequest) else _target_ids(what, models, special)
    return Written(ids, models.tokenization.pieces(ids), models.tokenization.shown(ids))


def _target_ids(prompt: Prompt, models: Models, special: bool = True, whole: bool = True) -> tuple[int, ...]:
    """Those of the target, `special` ones before a text; a `whole` prompt must fit its context."""
    tokenization = models.tokenization
    if isinstance(prompt, tuple):
        last = tokenization.vocabulary.size - 1
        wrong = [token for token in prompt if token > last]
        if wrong:
            raise RequestError(f"the prompt has the id {wrong[0]}; the target's ids are 0 to {last}", "prompt")
        return prompt
    text = _rendered(prompt, models.target) if isinstance(prompt, Chat) else prompt
    if whole:
        _check_length(len(text.encode()), models)
    return _encoded(tokenization, text, special and not isinstance(prompt, Chat))


def _encoded(tokenization: Tokenization, text: str, special: bool, field: str = "prompt") -> tuple[int, ...]:
    """As `Tokenization.encode_prompt`; raises RequestError, about this field."""
    try:
        return tokenization.encode_prompt(text, special)
    except ValueError as error:
        raise RequestError(str(error), field) from error


def _check_room(tokens: int, request: GenerationRequest, models: Models) -> None:
    """In vLLM's words; one token of the context is for the output, unless that has none."""
    if tokens + bool(request.max_tokens) > models.context:
        raise PromptTooLongError(
            f"This model's maximum context length is {models.context} tokens. However, your request has {tokens} "
            "input tokens. Please reduce the length of the prompt."
        )


def _check_length(size: int, models: Models) -> None:
    """Refuses a text of so many bytes if not even the longest tokens could write it."""
    longest = models.tokenization.longest
    if size > longest * models.context:
        raise PromptTooLongError(
            f"This model's maximum context length is {models.context} tokens. However, your request has {size} bytes "
            f"of text, and a token has at most {longest}. Please reduce the length of the prompt."
        )


def _rendered(chat: Chat, target: Description) -> str:
    if target.chat_template is None:
        raise RequestError(
            f"{target.model!r} has no chat template: start its target with one (--chat-template FILE), or send a text "
            "as the prompt of /v1/completions"
        )
    try:
        return rendered(chat, target.chat_template)
    except ChatTemplateError as error:
        raise RequestError(f"the chat template of {target.model!r} cannot write this chat: {error}") from error


def _chat_letters(chat: Chat, drafter: Description | None) -> tuple[Letters, bool]:
    """The chat for the drafter, and whether its template wrote it. Without a usable template it gets plain text: a
    drafter only guesses."""
    if drafter is not None and drafter.chat_template is not None:
        try:
            return from_bytes(rendered(chat, drafter.chat_template).encode()), True
        except ChatTemplateError:
            pass
    return from_bytes(plain(chat).encode()), False
