"""Audits: every draw of a drafter is recomputed from the row that came with it.

A drafter whose row is not the law that it drew from makes the output inexact, and nothing in the text shows it. With
keyed noise a draw is a function of its row, so one wrong draw proves the fault. It finds mistakes, not malice: the
drafter knows the noise.
"""

from dataclasses import dataclass

from crossdraft.text.pairing import Pair
from crossdraft.verification.audit import fault_of_draw
from crossdraft.verification.exchange import Drafted, NoiseKey
from crossdraft.verification.noise import KeyedNoise
from crossdraft.verification.rows import Whose
from crossdraft.verification.walk import proposal_letters


@dataclass(frozen=True, eq=False)
class Audit:
    """What the drafter's draws are recomputed with."""

    key: NoiseKey
    each_epoch: bool  # the epoch's number takes the place of the key's choice: a new draft at the same place is new
    drafter: KeyedNoise  # of the drafter's ids
    target: KeyedNoise  # of the target's ids, for proposals that use them

    def fault_of(self, drafted: Drafted, offset: int, pair: Pair) -> str:
        """Which draw of a draft that begins at `offset` letters of output is not its row's; empty if none."""
        key = NoiseKey(self.key.seed, drafted.epoch) if self.each_epoch else self.key
        for proposal in drafted.proposals:
            noise = self.target if proposal.whose is Whose.TARGET else self.drafter
            fault = fault_of_draw(proposal, noise, key, offset)
            if fault:
                return fault
            offset += len(proposal_letters(pair, proposal))
        return ""
