"""Resolves a request against a target and a drafter into the assignment of a session."""

from dataclasses import replace

import numpy as np

from crossdraft.session.assignment import Assignment, Audit, Secrets
from crossdraft.session.models import Models, choose_method, with_defaults
from crossdraft.session.output import fault_of_committed
from crossdraft.session.prompts import Prompts, prompts_of, sampling_of
from crossdraft.speculation.choice import MOST_AHEAD, PLAIN, TREES, Choice, Controller, Fixed, arms_for, lock_step
from crossdraft.speculation.controller import TargetController
from crossdraft.text.pairs import Pair
from crossdraft.types.messages import MOST_DRAFT_TOKENS, NoiseKey, OpenDrafter, OpenTarget, SamplingOptions
from crossdraft.types.request import GenerationRequest, Overlap, RequestError
from crossdraft.verification.chooser import RandomChooser
from crossdraft.verification.walk import Method

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
    allowed = models.pair.shared_drafter_ids if method.shared_only or method.redistributed else None
    if allowed is not None and not len(allowed):
        return None  # T∩D is empty: nothing could be proposed
    temperature, options = request.drafter_temperature, request.options.of_drafter
    return OpenDrafter(
        prompt=prompts.drafter,
        options=options if temperature is None else replace(options, temperature=temperature),
        noise=audit.key if audit is not None else noise if method.keyed else None,
        row_width=request.row_width if method.drafter_rows or audit is not None else 0,
        allowed=allowed,
        redistribute=models.digest if method.redistributed else "",
        audited=audit is not None and audit.each_epoch,
        templated=prompts.templated,
        scope=request.cache_salt,
    )
