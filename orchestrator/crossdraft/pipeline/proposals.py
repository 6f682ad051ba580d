"""Whether what a drafter sent can be verified at all. A drafter is not trusted to be right, only to be a drafter."""

from collections.abc import Sequence

import numpy as np

from crossdraft.text.pairing import Pair
from crossdraft.verification.methods import Method
from crossdraft.verification.rows import Proposal, Whose


def fault_of_draft(proposals: Sequence[Proposal], asked: int, pair: Pair, method: Method, rows: bool) -> str:
    """What is wrong with the proposals of one draft, as a text; empty if nothing is. `rows`: they must carry them."""
    if len(proposals) > asked:
        return f"it sent {len(proposals)} proposals, asked for {asked}"
    return next((fault for one in proposals if (fault := _fault(one, pair, method, rows))), "")


def _fault(proposal: Proposal, pair: Pair, method: Method, rows: bool) -> str:
    if proposal.whose is Whose.TARGET and not method.redistributed:
        return f"it proposed a token of the target's, and {method.name!r} asks for tokens of its own"
    size = pair.target.size if proposal.whose is Whose.TARGET else pair.drafter.size
    if not 0 <= proposal.token < size:
        return f"it proposed id {proposal.token}, and its ids are 0 to {size - 1}"
    if not rows:
        return ""
    row = proposal.row
    if row is None or not row.whole:
        return f"it proposed id {proposal.token} without the whole row that it was drawn from"
    if not len(row.ids) or row.ids.view(np.uint64).max() >= size:  # below 0 is far above as an unsigned number
        return f"the row of id {proposal.token} has ids beyond {size - 1}"
    shared = (method.shared_only or method.same_vocabulary) and not pair.same_vocabulary
    if shared and proposal.whose is Whose.DRAFTER and pair.to_target_ids(row.ids).min() < 0:
        return f"the row of id {proposal.token} reaches outside the shared tokens"
    return "" if row.probability(proposal.token) > 0 else f"the row of id {proposal.token} cannot give it"
