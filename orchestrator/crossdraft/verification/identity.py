"""The first event of `coupled`: whether the target's token and the proposal are the same token."""

import numpy as np

from crossdraft.text.pairing import Pair
from crossdraft.verification.chooser import Chooser
from crossdraft.verification.rows import Ids, Probabilities, Proposal, Row, Whose, masses_of


class Identity:
    """A target row p against the row q of a proposal; ids of the same letters count as one token on both sides."""

    def __init__(self, pair: Pair, row: Row, proposal: Proposal) -> None:
        """The row lists all target ids that the proposal's row can give.

        Raises:
            ValueError: the proposal has no row: its drafter was opened wrongly.
        """
        if proposal.row is None:
            raise ValueError("this method needs the row that each proposal was drawn from")
        drafted = proposal.whose is Whose.DRAFTER
        token = pair.target_id(proposal.token) if drafted else int(pair.names(np.array([proposal.token]))[0])
        self._row, self._draft_row = row, proposal.row
        self._names: Ids = pair.names(row.ids)  # what each listed id counts as
        self._drafted: Ids = pair.to_target_ids(proposal.row.ids) if drafted else pair.names(proposal.row.ids)
        self._same = self._names == (-1 if token is None else token)
        self._q = float(proposal.row.probabilities[self._drafted == token].sum())

    @property
    def acceptance(self) -> float:
        """p/q of the proposed token; the coin is min(1, p/q). 0 if the target has no such token."""
        p = float(self._row.probabilities[self._same].sum())
        return p / self._q if self._q else 0.0

    def draw(self, chooser: Chooser) -> int:
        """A target id that is the proposed token: of several each by its weight."""
        ids, weights = self._row.ids[self._same], self._row.probabilities[self._same]
        return int(ids[chooser.categorical(weights) if len(ids) > 1 else 0])

    def residuals(self) -> tuple[Probabilities, Probabilities]:
        """What a refusal leaves: (p - q)+ at each id of the target's row, (q - p)+ at each of the proposal's.

        Ids that count as one token share what is left of it in proportion; what only one side has stays.

        Raises:
            KeyError: the proposal's row reaches into the tail: the target's does not list what it was asked for.
        """
        p, q = self._row.probabilities, self._draft_row.probabilities
        tokens, of_p = self._tokens()
        of_q = tokens.places(self._drafted)  # -1: a token that the target lacks, or never says
        if not self._row.whole and ((of_q < 0) & (self._drafted >= 0)).any():
            raise KeyError(int(self._drafted[(of_q < 0) & (self._drafted >= 0)][0]))
        masses_p = tokens.probabilities
        masses_q = masses_of(of_q + 1, q, len(masses_p) + 1)[1:]
        left_p = p * _share_left(masses_p, masses_q)[of_p]
        if not self._row.tail and not left_p.any():
            left_p = p  # p and q differ by rounding only; a refusal then says nothing
        return left_p, q * np.append(_share_left(masses_q, masses_p), 1.0)[of_q]

    def _tokens(self) -> tuple[Row, Ids | slice]:
        """The target's row over what its ids count as, and the place of each id in it."""
        if self._names is self._row.ids:
            return self._row, slice(None)
        names, places = np.unique(self._names, return_inverse=True)
        return Row(names, masses_of(places, self._row.probabilities, len(names)), self._row.tail), places


def _share_left(mine: Probabilities, other: Probabilities) -> Probabilities:
    return np.divide(np.maximum(mine - other, 0.0), mine, out=np.zeros(len(mine)), where=mine > 0)
