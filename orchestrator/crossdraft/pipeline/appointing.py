"""Who decides how the epochs of a request are run."""

from crossdraft.pipeline.estimates import Estimates
from crossdraft.pipeline.governing import Choice, Fixed, Governor, lock_step
from crossdraft.pipeline.governor import Adaptive
from crossdraft.pipeline.request import GenerationRequest, Overlap
from crossdraft.pipeline.search import Limits
from crossdraft.verification.exchange import MOST_PROPOSALS
from crossdraft.verification.methods import Method


def governor_of(
    request: GenerationRequest, method: Method, targets: int, before: Estimates | None, follows: bool = False
) -> Governor:
    """Who decides how each epoch is run."""
    match request.overlap:
        case Overlap.OFF:
            return lock_step(request.k)
        case Overlap.ON:
            return Fixed(_always_overlapped(request))
    limits = Limits(
        rounds_only=method.whole_draft,
        samples=method.samples,
        window=most_proposals(request),
        wait=request.wait,
        branch_depth=request.branches,
        branch_width=request.branch_width,
        targets=targets,
    )
    return Adaptive(before, limits, follows)


def most_proposals(request: GenerationRequest) -> int:
    """Beyond those revealed."""
    if request.window is not None:
        return request.window
    usual = {Overlap.OFF: request.k, Overlap.ON: 2 * request.k, Overlap.AUTO: Limits().window}[request.overlap]
    return min(MOST_PROPOSALS, max(usual, request.wait or 0))


def _always_overlapped(request: GenerationRequest) -> Choice:
    """A pass is sent with k proposals if they come in time, and as many again are drafted meanwhile, in two replies.

    With a window or a wait of the request's own each of them is a reply: the drafter may be slow beside a pass.
    """
    window = most_proposals(request)
    wait = min(request.k, window) if request.wait is None else request.wait
    usual = request.window is None and request.wait is None
    return Choice(
        window=window,
        wait=wait,
        chunk=(wait + 1) // 2 if usual else 1,
        branch_depth=request.branches or 0,
        branch_width=request.branch_width or 1,
        speculate=request.speculation,
        reason="overlapped, as asked for",
    )
