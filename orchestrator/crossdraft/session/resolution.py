"""Resolves a request against a target and a drafter: its prompt and its sampling options as each model reads them, in
tokens of its own and with its own settings; and the assignment of a session.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from crossdraft.config.fields import unchecked
from crossdraft.session.assignment import Assignment, Audit, Secrets
from crossdraft.session.models import Models, choose_method, with_defaults
from crossdraft.session.output import fault_of_committed
from crossdraft.speculation.choice import MOST_AHEAD, PLAIN, TREES, Choice, Controller, Fixed, arms_for, lock_step
from crossdraft.speculation.controller import TargetController
from crossdraft.text.chat_template import ChatTemplateError
from crossdraft.text.grammar import GrammarError, of_letters
from crossdraft.text.letters import Letters, from_bytes, is_plain
from crossdraft.text.pairs import Pair
from crossdraft.text.tokenization import Tokenization
from crossdraft.types.messages import MOST_DRAFT_TOKENS, Description, NoiseKey, OpenDrafter, OpenTarget, SamplingOptions
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
from crossdraft.verification.walk import Method


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

    Raises RequestError: no id is left that may be drawn, or one is not the target's; or the grammar cannot be compiled.
    """
    _check_ids(request, models)
    tokenization, options = models.tokenization, models.target.defaults.fill(request.options)
    if options.grammar is not None:
        try:
            of_letters().matcher(options.grammar)
        except GrammarError as error:
            raise RequestError(str(error), "structured_outputs") from error
    words = [ids for word in request.bad_words for ids in _bad_word_ids(word, tokenization)]
    ends = sorted(tokenization.vocabulary.stops.union(request.stop_token_ids)) if options.min_tokens else ()
    allowed = frozenset(options.allowed_token_ids)
    options = unchecked(
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


def prompts_of(request: GenerationRequest, models: Models) -> Prompts:
    """Encode the prompt for both models. Takes as long as it is large, unless it cannot fit: call it in a thread.
    Raises RequestError: it has no token, an id that the target does not have, or a chat that its template refuses;
    PromptTooLongError: it leaves no room in the target's context; a text that cannot fit is not tokenized."""
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
    tokenization = models.tokenization
    plain = is_plain(tokenization.letters_of(ids))
    return Written(ids, tokenization.pieces(ids), tokenization.shown(ids), plain)


def _target_ids(prompt: Prompt, models: Models, special: bool = True, whole: bool = True) -> tuple[int, ...]:
    """Those of the target, `special` ones before a text; a `whole` prompt must fit its context."""
    tokenization = models.tokenization
    if isinstance(prompt, tuple):
        last = tokenization.vocabulary.size - 1
        wrong = [token for token in prompt if token > last]
        if wrong:
            raise RequestError(f"there is no token with the id {wrong[0]}; the target's ids are 0 to {last}", "prompt")
        return prompt
    text = _rendered(prompt, models.target) if isinstance(prompt, Chat) else prompt
    size, longest = len(text.encode()) if whole else 0, tokenization.longest
    if size > longest * models.context:  # not even the longest tokens could write it
        raise _too_long(f"{size} bytes of text, and a token has at most {longest}", models)
    return _encoded(tokenization, text, special and not isinstance(prompt, Chat))


def _encoded(tokenization: Tokenization, text: str, special: bool, field: str = "prompt") -> tuple[int, ...]:
    """As `Tokenization.encode_prompt`; raises RequestError, about this field."""
    try:
        return tokenization.encode_prompt(text, special)
    except ValueError as error:
        raise RequestError(str(error), field) from error


def _check_room(tokens: int, request: GenerationRequest, models: Models) -> None:
    """One token of the context is for the output, unless that has none."""
    if tokens + bool(request.max_tokens) > models.context:
        raise _too_long(f"{tokens} input tokens", models)


def _too_long(what: str, models: Models) -> PromptTooLongError:
    """In vLLM's words."""
    return PromptTooLongError(
        f"This model's maximum context length is {models.context} tokens. However, your request has {what}. "
        "Please reduce the length of the prompt."
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


SHARE_NOTHING = "the two vocabularies share no token, and this method drafts no others"
NODES_BESIDE_THE_DRAFT = 8  # of a pass's tree, beyond those for each path's draft tokens


def resolve(
    request: GenerationRequest,
    models: Models,
    drawn: Secrets | None = None,
    targets: int = 1,
    shared: TargetController | None = None,
    target_seconds: float = Assignment.target_seconds,
    prompts: Prompts | None = None,
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
        request=request,
        open_target=OpenTarget(
            prompts.target,
            sampling,
            noise,
            request.head,
            request.logprobs,
            request.ignore_eos,
            request.stop_token_ids,
            hidden=opening is not None and models.reads_hidden,
            impossible=True,
        ),
        open_drafter=opening,
        controller=controller,
        context=models.context,
        target_seconds=target_seconds,
        targets=targets,
        audit=audit,
        no_drafter=SHARE_NOTHING if opening is None and models.pair is not None else Assignment.no_drafter,
        tree_budget=request.paths * most_draft_tokens(request, models.copies) + NODES_BESIDE_THE_DRAFT,
    )
    if fault := fault_of_committed(assignment):
        raise RequestError(fault)
    return assignment


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
    """Nodes of draft trees that may be used; an audit recomputes the draws of chains only, and copies are chains.

    Of a method that judges rows only what the request asks for: whether such trees pay was not measured on time.
    """
    unasked = request.tree_nodes is None and not method.samples
    if unasked or method.whole_draft or request.audit or copies or request.tree_nodes == 0:
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


def _audit(models: Models, method: Method, noise: NoiseKey, drawn: Secrets) -> Audit:
    """With the key of the drafter's draws if the method has one, else one of its own: drafts stay independent of the
    target's noise."""
    if models.pair is None:
        raise RequestError("audit needs a drafter: give one, or leave out audit")
    return Audit(noise if method.keyed else NoiseKey(drawn.audit), not method.keyed, *models.noises)


def _open_drafter(
    request: GenerationRequest, models: Models, prompts: Prompts, method: Method, audit: Audit | None, noise: NoiseKey
) -> OpenDrafter | None:
    if models.pair is None or not request.max_tokens:
        return None
    allowed = models.pair.shared_drafter_ids if method.shared_only else None
    if allowed is not None and not len(allowed):
        return None  # T∩D is empty: nothing could be proposed
    temperature, options = request.drafter_temperature, request.options.of_drafter
    return OpenDrafter(
        prompt=prompts.drafter,
        options=options if temperature is None else unchecked(options, temperature=temperature),
        noise=audit.key if audit is not None else noise if method.keyed else None,
        row_width=request.row_width if method.drafter_rows or audit is not None else 0,
        allowed=allowed,
        redistribute=models.digest if method.redistributed else "",
        audited=audit is not None and audit.each_epoch,
        templated=prompts.templated,
        scope=request.cache_salt,
    )
