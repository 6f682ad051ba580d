"""Audits: a drafter's draw with keyed noise, made again from the row that it says it drew from."""

from crossdraft.verification.exchange import NoiseKey
from crossdraft.verification.noise import KeyedNoise
from crossdraft.verification.rows import Proposal


def fault_of_draw(proposal: Proposal, noise: KeyedNoise, key: NoiseKey, offset: int) -> str:
    """Why a proposal cannot have been drawn from its row, as a text; empty if it was.

    Rows travel as multiples of 2^-24, which float32 holds, so that the draw repeats bit by bit.

    Args:
        proposal: as it arrived; its ids must be in the vocabulary.
        noise: of the vocabulary whose ids it uses.
        key: what its draw is keyed by; in an audited session the choice is the epoch's number.
        offset: letters since the start of the output, up to where the proposal begins.
    """
    row = proposal.row
    if row is None:
        return f"id {proposal.token} at letter {offset} came without the row that it was drawn from"
    if not (row.probabilities > 0).any():
        return f"the row of id {proposal.token} at letter {offset} gives no id"
    drawn = noise.draw(row.ids, row.probabilities, key, offset)
    if drawn == proposal.token:
        return ""
    return f"id {proposal.token} at letter {offset} was not drawn from its row, which gives id {drawn} there"
