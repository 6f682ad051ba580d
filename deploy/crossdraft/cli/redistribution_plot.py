"""The picture of `crossdraft bench rdk`: Fig. 6, Fig. 7, and Fig. 7 with the matrix itself."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from crossdraft.cli.synthetic import KEPT, TAUS, Draw, Level
from crossdraft.text.kernels import first_order

PUBLISHED = 0.267  # "almost constant acceptance rate" (Fig. 7)
PRUNING = "random"  # what the picture shows; the tables have both
SHOWN = 400  # points of a line of Fig. 6, evenly spaced in the logarithm of the rank


def picture(levels: tuple[Level, ...], draw: Draw) -> Figure:
    """Three panels; `draw` is the one of the first."""
    figure = Figure(figsize=(12, 3.8), layout="constrained", dpi=80)
    masses, pruned, exact = figure.subplots(1, 3)
    _masses(masses, draw)
    _pruned(pruned, [level for level in levels if level.pruning == PRUNING and not level.figures.exact])
    _exact(exact, [level for level in levels if level.pruning == PRUNING and level.figures.exact])
    return figure


def _masses(axes: Axes, draw: Draw) -> None:
    """Fig. 6: the mass of each token, the target's most probable one first."""
    size = len(draw.p)
    masked = draw.masked(PRUNING, round(KEPT[-1] * size))
    proposed = masked / masked.sum()
    spread = first_order(proposed, draw.p)
    order = np.argsort(-draw.p, kind="stable")
    ranks = np.unique(np.geomspace(1, size, SHOWN).astype(np.int64)) - 1
    kept = np.flatnonzero(masked[order])
    axes.loglog(ranks + 1, draw.p[order][ranks], color="C0", label="target p")
    axes.loglog(kept + 1, masked[order][kept], ".", color="C1", markersize=3, label="masked")
    axes.loglog(kept + 1, proposed[order][kept], "x", color="C2", markersize=3, label="tli q′")
    left = np.setdiff1d(ranks, kept)
    axes.loglog(left + 1, spread[order][left], "--", color="C3", label="first-order, tokens that were cut")
    axes.set(title=f"{len(kept):,} of {size:,} tokens kept, one draw", xlabel="rank in p", ylabel="probability")
    axes.legend(fontsize=7)


def _pruned(axes: Axes, levels: list[Level]) -> None:
    """Fig. 7."""
    kept = [level.kept for level in levels]
    axes.plot(kept, [level.figures.tli for level in levels], color="C2", linewidth=3, alpha=0.5, label="tli")
    axes.plot(kept, [level.figures.first_order for level in levels], "--", color="C3", label="first-order, oracle p")
    axes.plot(kept, [level.figures.masked for level in levels], ":", color="C1", label="masked")
    axes.axhline(PUBLISHED, color="grey", linewidth=1, label="published, first-order")
    _finish(axes, levels)


def _exact(axes: Axes, levels: list[Level]) -> None:
    """Fig. 7 with Mᵀq′, at a size where M can be applied."""
    kept = [level.kept for level in levels]
    axes.plot(kept, [level.figures.tli for level in levels], color="C2", linewidth=3, alpha=0.5, label="tli")
    for place, tau in enumerate(TAUS):
        shares = [level.figures.exact[place] for level in levels]
        axes.plot(kept, shares, "--", color=f"C{4 + place}", label=f"exact, oracle Ω, τ = {tau:g}")
    axes.plot(kept, [level.figures.uniform for level in levels], ":", color="black", label="uniform draft")
    _finish(axes, levels)


def _finish(axes: Axes, levels: list[Level]) -> None:
    axes.set_xscale("log")
    axes.set(
        title=f"N = {levels[0].tokens:,}, random tokens kept", xlabel="tokens kept", ylabel="acceptance", ylim=(0, 1)
    )
    axes.legend(fontsize=7)
