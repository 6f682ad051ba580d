"""What a session works from, once a request has been resolved against its services."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from crossdraft.speculation.choice import Controller
from crossdraft.text.letters import Letters
from crossdraft.text.pairs import Pair
from crossdraft.types.messages import Drafted, OpenDrafter, OpenTarget
from crossdraft.types.rows import DraftToken, Whose
from crossdraft.types.trees import Path
from crossdraft.verification.chooser import Chooser
from crossdraft.verification.methods import Method
from crossdraft.verification.noise import Audit


def fault_of_draft(draft_tokens: Sequence[DraftToken], asked: int, pair: Pair, method: Method, rows: bool) -> str:
    """What is wrong with the draft tokens of one draft, as a text; empty if nothing is. `rows`: they must carry
    them.
    """
    if len(draft_tokens) > asked:
        return f"it sent {len(draft_tokens)} draft tokens, asked for {asked}"
    return next((fault for one in draft_tokens if (fault := _fault(one, pair, method, rows))), "")


def _fault(draft_token: DraftToken, pair: Pair, method: Method, rows: bool) -> str:
    if draft_token.whose is Whose.TARGET and not method.redistributed:
        return f"it proposed a token of the target's, and {method.name!r} asks for tokens of its own"
    size = pair.target.size if draft_token.whose is Whose.TARGET else pair.drafter.size
    if not 0 <= draft_token.token < size:
        return f"it proposed id {draft_token.token}, and its ids are 0 to {size - 1}"
    if not rows:
        return ""
    row = draft_token.row
    if row is None or not row.whole:
        return f"it proposed id {draft_token.token} without the whole row that it was drawn from"
    if not len(row.ids) or row.ids.view(np.uint64).max() >= size:  # below 0 is far above as an unsigned number
        return f"the row of id {draft_token.token} has ids beyond {size - 1}"
    shared = (method.shared_only or method.same_vocabulary) and not pair.same_vocabulary
    if shared and draft_token.whose is Whose.DRAFTER and pair.to_target_ids(row.ids).min() < 0:
        return f"the row of id {draft_token.token} reaches outside the shared tokens"
    return "" if row.probability(draft_token.token) > 0 else f"the row of id {draft_token.token} cannot give it"


@dataclass(frozen=True)
class Assignment:
    """The fixed facts of one session."""

    pair: Pair
    method: Method
    chooser: Chooser
    encode: Callable[[Letters], Path]  # continuation tokenizing with the target's tokenizer
    open_target: OpenTarget
    open_drafter: OpenDrafter | None  # None: plain decoding
    controller: Controller  # decides how each epoch is run
    max_tokens: int
    context: int  # tokens that the target can hold, prompt included
    ignore_end: bool = False  # go on after a stop symbol (ignore_eos)
    stop: tuple[Letters, ...] = ()  # stop strings
    draft_seconds: float = 30.0  # a drafter that owes an answer for longer is given up
    target_seconds: float = 30.0  # longest time without any target
    targets: int = 1  # lanes to targets that are held open
    paths: int = 2  # in a pass's tree at most: the method's guesses at the draft, then prepared continuations
    tree_budget: int = 16  # nodes of one pass at most
    committed: Path = ()  # the output's first tokens, from an earlier session that did not end
    audit: Audit | None = None  # set: every draw of the drafter is recomputed from its row

    def fault_of(self, drafted: Drafted, offset: int, asked: int) -> str:
        """What is wrong with draft tokens that begin at `offset` letters of output, where `asked` more were wanted."""
        rows = self.method.drafter_rows or self.audit is not None
        fault = fault_of_draft(drafted.draft_tokens, asked, self.pair, self.method, rows)
        if fault or self.audit is None:
            return fault
        return self.audit.fault_of(drafted, offset, self.pair)
