"""What a session works from, once a request has been resolved against a target and a drafter."""

from collections.abc import Callable
from dataclasses import dataclass

from crossdraft.pipeline.auditing import Audit
from crossdraft.pipeline.proposals import fault_of_draft
from crossdraft.text.letters import Letters
from crossdraft.text.pairing import Pair
from crossdraft.verification.chooser import Chooser
from crossdraft.verification.exchange import Drafted, OpenDrafter, OpenTarget
from crossdraft.verification.methods import Method
from crossdraft.verification.trees import Path


@dataclass(frozen=True)
class Assignment:
    """The fixed facts of one session."""

    pair: Pair
    method: Method
    chooser: Chooser
    encode: Callable[[Letters], Path]  # continuation tokenizing with the target's tokenizer
    open_target: OpenTarget
    open_drafter: OpenDrafter | None  # None: plain decoding
    proposals: int  # asked for in a round (K)
    max_tokens: int
    context: int  # tokens that the target can hold, prompt included
    ignore_end: bool = False  # go on after a stop symbol (ignore_eos)
    stop: tuple[Letters, ...] = ()  # stop strings
    draft_seconds: float = 30.0  # longest wait for a round's proposals
    tree_budget: int = 16  # nodes of one pass at most
    audit: Audit | None = None  # set: every draw of the drafter is recomputed from its row

    def fault_of(self, drafted: Drafted, offset: int) -> str:
        """What is wrong with a draft that begins at `offset` letters of output; empty if nothing is."""
        rows = self.method.drafter_rows or self.audit is not None
        fault = fault_of_draft(drafted.proposals, self.proposals, self.pair, self.method, rows)
        if fault or self.audit is None:
            return fault
        return self.audit.fault_of(drafted, offset, self.pair)
