"""What a round costs and yields, from one measured number of proposals to smaller ones: the cost model of `select`.

With K proposals a round takes m passes of t(K), K·d in the drafter and o beside the models, and yields

    tokens(K) = 1 + r·(a₁ + a₁a₂ + … + a₁…a_K),

where aⱼ is the share of proposals accepted at place j of those judged there, and r the target tokens that an accepted
proposal brings (drafter tokens may be longer or shorter). d, o, r and aⱼ are measured at the largest K, where the
formula gives what was measured. t(K) and m grow evenly with K: from a plain pass, and from one, to what was measured.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from crossdraft.cli.acceptance import summed
from crossdraft.pipeline import Statistics


@dataclass(frozen=True)
class Plain:
    """Decoding without a drafter."""

    step_seconds: float  # a token: pass, transport and bookkeeping
    pass_seconds: float  # in the target's model

    @staticmethod
    def of(figures: Sequence[Statistics]) -> "Plain":
        """Over some generations, none of them empty."""
        tokens = sum(figure.tokens for figure in figures)
        in_model = sum(figure.target_seconds for figure in figures)
        return Plain((in_model + _beside(figures)) / tokens, in_model / sum(figure.passes for figure in figures))


@dataclass(frozen=True)
class Rounds:
    """Rounds of `k` proposals, as measured."""

    k: int
    tokens: float  # of a round
    passes: float  # of a round: one, and row misses
    accepted_at: tuple[float, ...]  # a₁, …: accepted of those judged
    proposal_seconds: float  # d, in the drafter's model
    pass_seconds: float  # t(k), in the target's model
    beside_seconds: float  # o, of a round: transport and bookkeeping

    @staticmethod
    def of(k: int, figures: Sequence[Statistics]) -> "Rounds":
        """Over some generations, none of them empty."""
        rounds = sum(figure.epochs for figure in figures)
        passes = sum(figure.passes for figure in figures)
        proposals = sum(figure.proposals for figure in figures)
        judged = summed([figure.judged_at for figure in figures])
        accepted = summed([figure.accepted_at for figure in figures])
        return Rounds(
            k,
            tokens=sum(figure.tokens for figure in figures) / rounds,
            passes=passes / rounds,
            accepted_at=tuple(one / all_ if all_ else 0.0 for one, all_ in zip(accepted, judged, strict=True)),
            proposal_seconds=sum(figure.drafter_seconds for figure in figures) / max(1, proposals),
            pass_seconds=sum(figure.target_seconds for figure in figures) / passes,
            beside_seconds=_beside(figures) / rounds,
        )

    def tokens_with(self, k: int) -> float:
        """Expected tokens of a round of `k` proposals, at most the measured number of them."""
        whole = self._accepted(self.k)
        return 1 + (self.tokens - 1) * self._accepted(k) / whole if whole else 1.0

    def seconds_with(self, k: int, plain: Plain) -> float:
        """Expected time of such a round."""
        wider = max(0.0, self.pass_seconds - plain.pass_seconds)
        share = k / self.k
        in_target = (1 + (self.passes - 1) * share) * (plain.pass_seconds + wider * share)
        return in_target + k * self.proposal_seconds + self.beside_seconds

    def speed_with(self, k: int, plain: Plain) -> float:
        """Expected speed, of that without a drafter."""
        return self.tokens_with(k) * plain.step_seconds / self.seconds_with(k, plain)

    def best(self, ks: Iterable[int], plain: Plain) -> int:
        """The number of proposals with the largest expected speed; of equal ones the first."""
        return max(ks, key=lambda k: self.speed_with(k, plain))

    def _accepted(self, k: int) -> float:
        """Expected number of proposals accepted in a row."""
        return float(sum(accumulate(self.accepted_at[:k], mul)))


def _beside(figures: Sequence[Statistics]) -> float:
    return sum(figure.wire_seconds + figure.verification_seconds for figure in figures)
