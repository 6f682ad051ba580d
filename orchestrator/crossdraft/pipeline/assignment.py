"""What a session works from, once a request has been resolved against its services."""

from collections.abc import Callable
from dataclasses import dataclass

from crossdraft.pipeline.auditing import Audit
from crossdraft.pipeline.governing import Governor
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
    governor: Governor  # decides how each epoch is run
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
        """What is wrong with proposals that begin at `offset` letters of output, where `asked` more were wanted."""
        rows = self.method.drafter_rows or self.audit is not None
        fault = fault_of_draft(drafted.proposals, asked, self.pair, self.method, rows)
        if fault or self.audit is None:
            return fault
        return self.audit.fault_of(drafted, offset, self.pair)
