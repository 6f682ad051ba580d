"""The synthetic experiment of RDK (section 6.2, Figs. 6 and 7), made again.

What the paper leaves open is chosen here: the scale of the Student-t logits is such that the most probable quarter of
the tokens has the published share; the drafter's logits are the target's with Gaussian noise; the tokens that are kept
are random ones, or the target's most probable ones. First-order RDK is given the target's own p, an oracle.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from statistics import fmean

import numpy as np

from crossdraft.text.kernels import Ids, Probabilities, first_order

DEGREES = 5  # of freedom of the logits (Fig. 3)
TOP_QUARTER = 0.958  # mass of the most probable quarter of the tokens (Fig. 5)
KEPT = (0.75, 0.5, 0.25, 0.1, 0.05, 0.025, 0.01, 0.005, 0.0025)  # shares of the vocabulary; the last is Fig. 6's
TAUS = (1e-4, 1e-2, 1.0)  # τ of Eq. 2
BLOCK = 256  # rows of M at a time


@dataclass(frozen=True)
class Study:
    """What is drawn."""

    tokens: int = 200_000  # N, for the first-order form
    exact_tokens: int = 2_000  # N, where M itself is applied: O(N²)
    draws: int = 20  # of target and drafter; figures are means over them
    noise: float = 1.0  # standard deviation of the noise on the drafter's logits
    seed: int = 0


@dataclass(frozen=True)
class Figures:
    """Of one draw, or means over draws: acceptance Σ min(p, ·) of each proposal, and what it depends on."""

    masked: float  # q on the kept tokens, not renormalized
    tli: float  # q′: renormalized
    first_order: float  # Eq. 3 with the target's own p
    uniform: float  # 1/N for every token
    exact: tuple[float, ...]  # Mᵀq′ with Ω = diag(p) − ppᵀ, for each of TAUS; empty: not computed
    theta: float  # p·q′
    change: float  # |Eq. 3 − q′|₁
    error: float  # |Eq. 3 − Mᵀq′|₁ for the largest of TAUS; 0: not computed


@dataclass(frozen=True)
class Level:
    """One pruning of one vocabulary size."""

    tokens: int  # N
    pruning: str  # which tokens are kept, for people
    kept: int  # tokens of the drafter
    figures: Figures


@dataclass(frozen=True, eq=False)
class Draw:
    """A target and a drafter before it is pruned, both of shape (N,)."""

    p: Probabilities
    q: Probabilities
    orders: dict[str, Ids]  # by which are kept: the tokens, those that are cut last first

    @staticmethod
    def of(tokens: int, noise: float, random: np.random.Generator) -> "Draw":
        """One draw."""
        logits = _scaled(random.standard_t(DEGREES, tokens))
        p = _softmax(logits)
        q = _softmax(logits + noise * random.standard_normal(tokens))
        return Draw(p, q, {"random": random.permutation(tokens), "the most probable": np.argsort(-p, kind="stable")})

    def masked(self, pruning: str, kept: int) -> Probabilities:
        """q without the tokens that are cut."""
        ids = self.orders[pruning][:kept]
        found = np.zeros(len(self.q))
        found[ids] = self.q[ids]
        return found


def run(study: Study) -> Iterator[Level]:
    """The levels of the large vocabulary, then those of the small one."""
    for tokens, taus in ((study.tokens, ()), (study.exact_tokens, TAUS)):
        draws = [draw_of(study, tokens, number) for number in range(study.draws)]
        for pruning in draws[0].orders:
            for share in KEPT:
                kept = max(1, round(share * tokens))
                found = [figures_of(draw.p, draw.masked(pruning, kept), taus) for draw in draws]
                yield Level(tokens, pruning, kept, _mean(found))


def figures_of(p: Probabilities, masked: Probabilities, taus: tuple[float, ...]) -> Figures:
    """The figures of one target and one pruned drafter, both of shape (N,)."""
    proposed = masked / masked.sum()
    spread = first_order(proposed, p)
    exact = [redistributed(proposed, p, tau) for tau in taus]
    return Figures(
        masked=_acceptance(p, masked),
        tli=_acceptance(p, proposed),
        first_order=_acceptance(p, spread),
        uniform=_acceptance(p, np.full(len(p), 1 / len(p))),
        exact=tuple(_acceptance(p, found) for found in exact),
        theta=float(p @ proposed),
        change=float(np.abs(spread - proposed).sum()),
        error=float(np.abs(spread - exact[-1]).sum()) if exact else 0.0,
    )


def redistributed(proposed: Probabilities, p: Probabilities, tau: float) -> Probabilities:
    """Mᵀq′ with M = softmax(Ω/τ) (Eq. 2) and Ω = diag(p) − ppᵀ, the covariance of one token drawn from p."""
    found = np.zeros(len(p))
    ids = np.flatnonzero(proposed)
    for first in range(0, len(ids), BLOCK):
        block = ids[first : first + BLOCK]
        omega = -np.outer(p[block], p)
        omega[np.arange(len(block)), block] += p[block]
        rows = np.exp((omega - omega.max(axis=1, keepdims=True)) / tau)
        found += (proposed[block] / rows.sum(axis=1)) @ rows
    return found


def draw_of(study: Study, tokens: int, number: int) -> Draw:
    """The study's `number`-th draw of a vocabulary of this size."""
    return Draw.of(tokens, study.noise, np.random.default_rng((study.seed, tokens, number)))


def _scaled(logits: Probabilities) -> Probabilities:
    """The logits times what gives the most probable quarter its share, by bisection."""
    order = np.sort(logits)[::-1]
    low, high = 0.0, 64.0
    for _ in range(40):
        middle = (low + high) / 2
        quarter = float(_softmax(order * middle)[: len(order) // 4].sum())
        low, high = (middle, high) if quarter < TOP_QUARTER else (low, middle)
    return logits * low


def _softmax(logits: Probabilities) -> Probabilities:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def _acceptance(p: Probabilities, proposed: Probabilities) -> float:
    return float(np.minimum(p, proposed).sum())


def _mean(found: list[Figures]) -> Figures:
    names = [field.name for field in fields(Figures) if field.name != "exact"]
    exact = tuple(fmean(values) for values in zip(*(one.exact for one in found), strict=True))
    return Figures(exact=exact, **{name: fmean(getattr(one, name) for one in found) for name in names})
