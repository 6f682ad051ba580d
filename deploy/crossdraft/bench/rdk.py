"""`crossdraft bench rdk`: the synthetic experiment of RDK (section 6.2, Figs. 6 and 7), made again.

What the paper leaves open is chosen here: the scale of the Student-t logits is such that the most probable quarter of
the tokens has the published share; the drafter's logits are the target's with Gaussian noise; the tokens that are kept
are random ones, or the target's most probable ones. First-order RDK is given the target's own p, an oracle.
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import groupby
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from crossdraft.bench.commands import RdkPlan
from crossdraft.bench.harness import Benchmark, Columns, Table
from crossdraft.console.running import PICTURES, ProgressCounter, check_output, save_picture
from crossdraft.text.affinity import Probabilities, first_order
from crossdraft.text.letters import Ids

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEGREES = 5  # of freedom of the logits (Fig. 3)
TOP_QUARTER = 0.958  # mass of the most probable quarter of the tokens (Fig. 5)
KEPT = (0.75, 0.5, 0.25, 0.1, 0.05, 0.025, 0.01, 0.005, 0.0025)  # shares of the vocabulary; the last is Fig. 6's
TAUS = (1e-4, 1e-2, 1.0)  # τ of Eq. 2
BLOCK = 256  # rows of M at a time


@dataclass(frozen=True)
class RdkFigures:
    """Of one draw, or means over draws: acceptance Σ min(p, ·) of each draft token, and what it depends on."""

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
    figures: RdkFigures


@dataclass(frozen=True, eq=False)
class DistributionPair:
    """A target and a drafter before it is pruned, both of shape (N,)."""

    p: Probabilities
    q: Probabilities
    orders: dict[str, Ids]  # by which are kept: the tokens, those that are cut last first

    @staticmethod
    def of(tokens: int, noise: float, random: np.random.Generator) -> "DistributionPair":
        """One draw."""
        logits = _scaled(random.standard_t(DEGREES, tokens))
        p = _softmax(logits)
        q = _softmax(logits + noise * random.standard_normal(tokens))
        return DistributionPair(
            p, q, {"random": random.permutation(tokens), "the most probable": np.argsort(-p, kind="stable")}
        )

    def masked(self, pruning: str, kept: int) -> Probabilities:
        """q without the tokens that are cut."""
        ids = self.orders[pruning][:kept]
        found = np.zeros(len(self.q))
        found[ids] = self.q[ids]
        return found


def figures_of(p: Probabilities, masked: Probabilities, taus: tuple[float, ...]) -> RdkFigures:
    """The figures of one target and one pruned drafter, both of shape (N,)."""
    proposed = masked / masked.sum()
    spread = first_order(proposed, p)
    exact = [redistributed(proposed, p, tau) for tau in taus]
    return RdkFigures(
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


def _mean(found: list[RdkFigures]) -> RdkFigures:
    names = [field.name for field in fields(RdkFigures) if field.name != "exact"]
    exact = tuple(fmean(values) for values in zip(*(one.exact for one in found), strict=True))
    return RdkFigures(exact=exact, **{name: fmean(getattr(one, name) for one in found) for name in names})


class Study(Benchmark[RdkPlan, Level]):
    """Random targets and drafters, pruned more and more."""

    unit: ClassVar[str] = "levels"

    @property
    def total(self) -> int:
        return 4 * len(KEPT)

    def check(self) -> None:
        if self.plan.plot is not None:
            check_output(self.plan.plot, *PICTURES)

    async def measure(self, advance: ProgressCounter) -> AsyncGenerator[Level, None]:
        for tokens, taus in ((self.plan.tokens, ()), (self.plan.exact_tokens, TAUS)):
            draws = [self.draw(tokens, number) for number in range(self.plan.draws)]
            for pruning in draws[0].orders:
                for share in KEPT:
                    kept = max(1, round(share * tokens))
                    found = [figures_of(draw.p, draw.masked(pruning, kept), taus) for draw in draws]
                    yield Level(tokens, pruning, kept, _mean(found))
                    advance()

    def draw(self, tokens: int, number: int) -> DistributionPair:
        """The `number`-th draw of a vocabulary of this size."""
        return DistributionPair.of(tokens, self.plan.noise, np.random.default_rng((self.plan.seed, tokens, number)))

    def report(self, results: Sequence[Level]) -> Iterator[Table | str]:
        for (tokens, pruning), group in groupby(results, lambda level: (level.tokens, level.pruning)):
            levels = list(group)
            title = f"acceptance, N = {tokens:,}, {pruning} tokens kept"
            if levels[0].figures.exact:
                yield Table.of(levels, EXACT, f"{title}, Mᵀq′ itself")
            else:
                yield Table.of(levels, PRUNED, title)

    def finish(self, results: Sequence[Level]) -> None:
        if self.plan.plot is not None:
            save_picture(picture(results, self.draw(self.plan.tokens, 0)), self.plan.plot)


PRUNED: Columns = {
    "kept": lambda level: f"{level.kept:,}",
    "masked": lambda level: f"{level.figures.masked:.2%}",
    "tli": lambda level: f"{level.figures.tli:.2%}",
    "first-order": lambda level: f"{level.figures.first_order:.2%}",
    "uniform": lambda level: f"{level.figures.uniform:.2%}",
    "|Eq. 3 − q′|₁": lambda level: f"{level.figures.change:.1e}",
    "θ = p·q′": lambda level: f"{level.figures.theta:.1e}",
}
EXACT: Columns = {
    "kept": lambda level: f"{level.kept:,}",
    "tli": lambda level: f"{level.figures.tli:.2%}",
    f"τ={TAUS[0]:g}": lambda level: f"{level.figures.exact[0]:.2%}",
    f"τ={TAUS[1]:g}": lambda level: f"{level.figures.exact[1]:.2%}",
    f"τ={TAUS[2]:g}": lambda level: f"{level.figures.exact[2]:.2%}",
    "uniform": lambda level: f"{level.figures.uniform:.2%}",
    "|Eq. 3 − Mᵀq′|₁": lambda level: f"{level.figures.error:.3f}",
    "θ = p·q′": lambda level: f"{level.figures.theta:.1e}",
}


# The picture: Fig. 6, Fig. 7, and Fig. 7 with the matrix itself.

PUBLISHED = 0.267  # "almost constant acceptance rate" (Fig. 7)
PRUNING = "random"  # what the picture shows; the tables have both
SHOWN = 400  # points of a line of Fig. 6, evenly spaced in the logarithm of the rank


def picture(levels: Sequence[Level], draw: DistributionPair) -> "Figure":
    """Three panels; `draw` is the one of the first."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained", dpi=80)
    masses, *acceptances = figure.subplots(1, 3)
    _masses(masses, draw)
    for axes, exact in zip(acceptances, (False, True), strict=True):
        _acceptances(axes, [one for one in levels if one.pruning == PRUNING and bool(one.figures.exact) == exact])
    return figure


def _masses(axes: "Axes", draw: DistributionPair) -> None:
    """Fig. 6: the mass of each token, the target's most probable one first."""
    size = len(draw.p)
    masked = draw.masked(PRUNING, round(KEPT[-1] * size))
    proposed = masked / masked.sum()
    order = np.argsort(-draw.p, kind="stable")
    ranks = np.unique(np.geomspace(1, size, SHOWN).astype(np.int64)) - 1
    kept = np.flatnonzero(masked[order])
    left = np.setdiff1d(ranks, kept)
    for name, style, masses, places in (
        ("target p", "-", draw.p, ranks),
        ("masked", ".", masked, kept),
        ("tli q′", "x", proposed, kept),
        ("first-order, tokens that were cut", "--", first_order(proposed, draw.p), left),
    ):
        axes.loglog(places + 1, masses[order][places], style, markersize=3, label=name)
    axes.set(title=f"{len(kept):,} of {size:,} tokens kept, one draw", xlabel="rank in p", ylabel="probability")
    axes.legend(fontsize=7)


def _acceptances(axes: "Axes", levels: Sequence[Level]) -> None:
    """Fig. 7, or the same with Mᵀq′, at a size where M can be applied."""
    figures = [level.figures for level in levels]
    lines = {"tli": [one.tli for one in figures]}
    if figures[0].exact:
        found = zip(*(one.exact for one in figures), strict=True)
        lines |= {f"exact, oracle Ω, τ = {tau:g}": list(shares) for tau, shares in zip(TAUS, found, strict=True)}
        lines["uniform draft"] = [one.uniform for one in figures]
    else:
        lines |= {"first-order, oracle p": [one.first_order for one in figures]}
        lines |= {"masked": [one.masked for one in figures], "published, first-order": [PUBLISHED] * len(figures)}
    for number, (name, shares) in enumerate(lines.items()):
        axes.plot([one.kept for one in levels], shares, ("-", "--", ":")[number % 3], label=name)
    title = f"N = {levels[0].tokens:,}, random tokens kept"
    axes.set(title=title, xlabel="tokens kept", ylabel="acceptance", xscale="log", ylim=(0, 1))
    axes.legend(fontsize=7)
