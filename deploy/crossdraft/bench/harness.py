"""What all benchmarks share: prompts, the settings that are compared, services that run while they are measured."""

import json
import os
import shutil
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import erfc, exp, lgamma, log, log10, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from rich import box
from rich.table import Table

from crossdraft.client import Generation, GenerationRequest, Overlap, SamplingOptions, Statistics
from crossdraft.console.processes import Wanted, services, threads_each
from crossdraft.console.running import CommandFailed, Misused, checked_options, print_whole
from crossdraft.text.report import Combinations, OfLength
from crossdraft.training.prompts import read_prompts
from crossdraft.types.rows import Probabilities
from crossdraft.verification.methods import method_named

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

SEED = 0


@dataclass(frozen=True)
class Setting:
    """One way to decode, in lock-step rounds."""

    method: str
    drafter: str  # a model's name
    temperature: float
    k: int  # draft tokens in a round

    def requests(self, prompts: Sequence[str], max_tokens: int) -> list[GenerationRequest]:
        """One request a prompt. Where the method takes a seed, each prompt has the same noise in every run.

        Raises:
            ValueError: a value is out of its range.
        """
        seed = SEED if method_named(self.method).seedable else None
        options = SamplingOptions(self.temperature)
        return [
            GenerationRequest(
                text,
                self.method,
                self.k,
                max_tokens,
                options,
                seed=seed,
                choice=number,
                allow_inexact=True,
                overlap=Overlap.OFF,
            )
            for number, text in enumerate(prompts)
        ]


@dataclass(frozen=True)
class Workload:
    """What is measured."""

    target: str  # a model's name
    settings: tuple[Setting, ...]  # by drafter, so that each is started once
    prompts: tuple[str, ...]
    max_tokens: int
    affinities: Mapping[str, Path] = field(default_factory=dict)  # by a drafter's name, for `rdk`

    def check(self) -> None:
        """Raises Misused if a request would be refused, before anything is started."""
        with checked_options():
            for setting in self.settings:
                setting.requests(self.prompts, self.max_tokens)


def settings_of(
    target: str, drafters: Sequence[str], methods: Sequence[str], temperatures: Sequence[float], ks: Sequence[int]
) -> tuple[Setting, ...]:
    """Every combination; a method for one vocabulary has the target's own model as its drafter.

    Raises:
        Misused: there is no such method.
    """
    with checked_options():
        own = [name for name in methods if method_named(name).same_vocabulary]
    pairs = [(name, drafter) for drafter in drafters for name in methods if name not in own]
    pairs += [(name, target) for name in own]
    return tuple(
        Setting(method, drafter, temperature, k)
        for method, drafter in pairs
        for temperature in temperatures
        for k in ks
    )


def prompts_of(path: Path, limit: int | None) -> tuple[str, ...]:
    """The first `limit` prompts of a file.

    Raises:
        Misused: there is no such file, or it has no prompts.
    """
    try:
        return tuple(prompt.text for prompt in read_prompts(path)[:limit])
    except UnicodeDecodeError as error:
        raise Misused(
            f'{path} is not UTF-8: {error.reason}; give JSON lines such as {{"text": "def main("}}'
        ) from error
    except ValueError as error:
        raise Misused(str(error)) from error
    except OSError as error:
        raise Misused(
            f"cannot read the prompts: {error}; run this in a checkout of crossdraft, which has tests/prompts.jsonl, "
            "or give a file with --prompts"
        ) from error


def affinities_of(options: Sequence[str], drafters: Sequence[str]) -> dict[str, Path]:
    """The files of options NAME=FILE, by drafter.

    Raises:
        Misused: an option is not of this form, or its name is not one of the drafters.
    """
    found: dict[str, Path] = {}
    for option in options:
        name, equals, file = option.rpartition("=")
        if not (equals and name and file):
            raise Misused(f"--affinity takes NAME=FILE, such as {drafters[0]}=affinity.npz, got {option!r}")
        if name not in drafters:
            raise Misused(f"--affinity names the drafter {name!r}, and the drafters are {', '.join(drafters)}")
        found[name] = Path(file)
    return found


async def running_pairs(workload: Workload) -> AsyncGenerator[tuple[str, str, tuple[Setting, ...]], None]:
    """Addresses of the target and of a drafter that runs for this step, and the settings with this drafter.

    Close it with `contextlib.aclosing`, which ends the services.

    Raises:
        CommandFailed: a service does not start.
    """
    threads = threads_each(2)
    async with services([Wanted("target", workload.target, threads)]) as (target,):
        for name, settings in groupby(workload.settings, key=lambda setting: setting.drafter):
            more = ("--affinity", str(workload.affinities[name])) if name in workload.affinities else ()
            async with services([Wanted("drafter", name, threads, more)]) as (drafter,):
                yield target, drafter, tuple(settings)


async def finished(generation: Generation) -> Statistics:
    """The figures of a generation, which runs to its end here.

    Raises:
        CommandFailed: its drafter was lost on the way, so that they would say nothing about the drafter.
    """
    async with generation:
        async for _ in generation:
            pass
    figures = generation.statistics
    if figures is None or figures.drafter_lost:
        reason = "no statistics" if figures is None else figures.drafter_lost
        raise CommandFailed(f"the drafter was lost during the measurement (overloaded? measure less at once): {reason}")
    return figures


def print_table(title: str, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints it on stdout; the first two columns are names, the others figures."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(names):
        table.add_column(name, justify="left" if place < 2 else "right", no_wrap=place != 1, overflow="fold")
    for row in rows:
        table.add_row(*row)
    print_whole(table)


def write_json(path: Path, record: dict[str, object]) -> None:
    """Writes what was measured; raises CommandFailed."""
    try:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"cannot write the results: {error}") from error


def write_text(path: Path, text: str) -> None:
    """Writes a report; raises CommandFailed."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"cannot write the report: {error}") from error


# Speeds that are compared on the same prompts: ratios with their 95 % intervals, over prompts drawn again.

DRAWS = 4_000  # of the prompts, with replacement (the bootstrap)
LOW, HIGH = 2.5, 97.5  # per cent
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Timed:
    """A generation: how many tokens it made, and how long that took."""

    tokens: int
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Ratio:
    """A ratio of two speeds, and between what it is in 95 of 100 sets of prompts like these."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def speed_of(runs: Sequence[Timed]) -> float:
    """Tokens a second over all of them."""
    seconds = sum(run.seconds for run in runs)
    return sum(run.tokens for run in runs) / seconds if seconds else 0.0


def speed_ratio(ours: Sequence[Timed], others: Sequence[Timed]) -> Ratio:
    """Of all tokens over all time, ours and others'; runs at the same place are of the same prompt."""

    def ratio(places: npt.NDArray[np.int64]) -> Floats:
        ours_, others_ = _speeds(ours, places), _speeds(others, places)
        found: Floats = ours_ / others_
        return found

    return _interval(ratio, len(ours), len(others))


def median_ratio(ours: Sequence[Timed], others: Sequence[Timed]) -> Ratio:
    """The median over prompts of the ratio of both speeds."""
    ratios = np.array([one.speed / other.speed for one, other in zip(ours, others, strict=True)])

    def median(places: npt.NDArray[np.int64]) -> Floats:
        found: Floats = np.median(ratios[places], axis=-1)
        return found

    return _interval(median, len(ours), len(others))


def rotated(count: int, turn: int) -> list[int]:
    """0 to count − 1, beginning further on with each turn, so that none of them always comes after the same one."""
    return [(turn + place) % count for place in range(count)]


def _speeds(runs: Sequence[Timed], places: npt.NDArray[np.int64]) -> Floats:
    tokens = np.array([run.tokens for run in runs], dtype=np.float64)[places].sum(axis=-1)
    speeds: Floats = tokens / np.array([run.seconds for run in runs])[places].sum(axis=-1)
    return speeds


def _interval(statistic: Callable[[npt.NDArray[np.int64]], Floats], count: int, as_many: int) -> Ratio:
    """Of a statistic of places, shape (..., count) to shape (...)."""
    if count != as_many or not count:
        raise ValueError(f"runs are compared in pairs, at least one: {count} and {as_many} were given")
    drawn = statistic(np.random.default_rng(SEED).integers(count, size=(DRAWS, count)))
    low, high = np.percentile(drawn, [LOW, HIGH])
    return Ratio(float(statistic(np.arange(count))), float(low), float(high))


# Whether counts fit a distribution: Pearson's chi-square test.

LEAST = 5.0  # expected count of a cell; smaller ones are pooled


@dataclass(frozen=True)
class Fit:
    """One test."""

    count: int  # of draws
    statistic: float
    freedom: int  # degrees of freedom: cells less one
    p: float  # probability of a statistic at least as large, if the draws have the distribution


def fit_of(counts: Mapping[int, int], distribution: Probabilities) -> Fit | None:
    """Compares draws with their distribution; None if there are too few for two cells.

    Args:
        counts: how often each id was drawn.
        distribution: probability of each id, shape (V,), sums to one.
    """
    drawn = np.zeros(len(distribution))
    drawn[list(counts)] = list(counts.values())
    total = float(drawn.sum())
    expected = total * distribution
    large = expected >= LEAST
    observed = np.append(drawn[large], drawn[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    if wanted[-1] < LEAST and len(wanted) > 1:  # what is left is too little for a cell: the smallest one takes it
        place = int(wanted[:-1].argmin())
        for cells in (observed, wanted):
            cells[place] += cells[-1]
        observed, wanted = observed[:-1], wanted[:-1]
    if len(wanted) < 2:
        return None
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    return Fit(int(total), statistic, len(wanted) - 1, chi_square_tail(statistic, len(wanted) - 1))


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(χ² ≥ statistic) = Q(freedom / 2, statistic / 2), the regularized upper incomplete gamma function.

    A finite sum, as freedom / 2 = a is a whole or half number: Q(a + 1, x) = Q(a, x) + xᵃ e⁻ˣ / Γ(a + 1), from
    Q(1, x) = e⁻ˣ or Q(1/2, x) = erfc(√x).
    """
    x = statistic / 2
    if x == 0:
        return 1.0
    a, tail = (0.5, erfc(sqrt(x))) if freedom % 2 else (1.0, exp(-x))
    while a < freedom / 2:
        tail += exp(a * log(x) - x - lgamma(a + 1))
        a += 1
    return min(1.0, tail)


# Pictures of what is measured. matplotlib is imported when one is drawn, and needs no display.

DOTS_PER_INCH = 150
FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class SpeedCurve:
    """Speed of one drafter and method against the number of draft tokens; 1 is decoding without a drafter."""

    label: str
    expected: Mapping[int, float]  # by K
    k: int  # where it was measured
    measured: float
    error: float  # standard


def check_picture(path: Path | None) -> None:
    """Raises Misused if a picture cannot be written there, before anything is measured."""
    if path is None:
        return
    if path.suffix.lower() not in FORMATS:
        raise Misused(f"--plot writes {', '.join(FORMATS)} files, got {path}")
    if not path.parent.is_dir():
        raise Misused(f"--plot: there is no folder {path.parent}")


def plot_speeds(path: Path, title: str, curves: Sequence[SpeedCurve]) -> None:
    """Lines of expected speed, and a point where it was measured.

    Raises:
        CommandFailed: the file cannot be written.
    """
    from matplotlib.ticker import MaxNLocator

    figure, (axes,) = _figure(8.0, 5.0, 1)
    for place, curve in enumerate(curves):
        colour = f"C{place % 10}"
        ks = sorted(curve.expected)
        style = "-" if place < 10 else "--"
        axes.plot(ks, [curve.expected[k] for k in ks], style, color=colour, label=curve.label, linewidth=1.6)
        aside = curve.k + 0.04 * (place - (len(curves) - 1) / 2)  # so that errors do not cover one another
        axes.errorbar(aside, curve.measured, curve.error, fmt="o", color=colour, markersize=6, markeredgecolor="white")
    axes.axhline(1.0, color="black", linewidth=1.0, linestyle=":")
    axes.annotate("without a drafter", (0.99, 1.0), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    axes.set_xlabel("K, draft tokens in a round")
    axes.set_ylabel("speed, of that without a drafter")
    axes.set_ylim(bottom=0.0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(
        f"{title}\nlines: expected by the cost model; points: measured, with standard errors", fontsize=10, loc="left"
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    _save(figure, path)


def plot_combinations(path: Path, title: str, found: Combinations) -> None:
    """Combinations of draft tokens for a target token: against its length, and how many tokens have how many.

    Raises:
        CommandFailed: the file cannot be written.
    """
    _save(combinations_figure(title, found), path)


def combinations_figure(title: str, found: Combinations) -> "Figure":
    """The same, not yet written."""
    from matplotlib.ticker import MaxNLocator

    figure, (left, right) = _figure(11.0, 4.5, 2)
    most = _most_shown(found.by_length)
    shown = [one for one in found.by_length if one.letters <= most]
    longer = sum(one.tokens for one in found.by_length if one.letters > most)
    boxes = [
        {"whislo": one.smallest, "q1": low, "med": middle, "q3": high, "whishi": one.largest}
        for one in shown
        for low, middle, high in [one.quartiles]
    ]
    left.bxp(boxes, positions=[one.letters for one in shown], widths=0.6, showfliers=False, manage_ticks=False)
    cut = (
        f"{longer:,} tokens of more than {most} letters are"
        if longer > 1
        else f"1 token of more than {most} letters is"
    )
    left.set_xlabel("letters of the target token" + (f"\n({cut} not shown)" if longer else ""))
    left.set_ylabel("draft-token combinations")
    left.set_title("by length: median, quartiles, extremes", fontsize=10)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    _powers_of_ten(left.yaxis, max((one.largest for one in shown), default=0.0))
    left.set_ylim(bottom=-0.05, top=max(1.0, left.get_ylim()[1]))
    # Powers of two on a decadic axis: the counts themselves may exceed a float.
    places, tokens = [n * log10(2) for n, _ in found.by_power], [count for _, count in found.by_power]
    right.bar(places, tokens, width=log10(2), align="edge", color="C0", edgecolor="white")
    _powers_of_ten(right.xaxis, max(places, default=0.0))
    right.set_xlim(left=-0.05, right=max(1.0, right.get_xlim()[1]))
    right.set_yscale("log")
    right.set_xlabel("draft-token combinations")
    right.set_ylabel("target tokens")
    right.set_title("how many tokens have how many", fontsize=10)
    figure.suptitle(title, fontsize=11)
    return figure


SHARE_SHOWN = 0.995  # of the tokens; a few runs of blanks are far longer than the rest


def _most_shown(by_length: Sequence[OfLength]) -> int:
    """The length up to which nearly all tokens lie."""
    left = SHARE_SHOWN * sum(one.tokens for one in by_length)
    for one in by_length:
        left -= one.tokens
        if left <= 0:
            return one.letters
    return 0


def _powers_of_ten(axis: "Axis", largest: float) -> None:
    """Ticks at whole powers, of exponents up to `largest`."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=8 if largest > 1 else 1, integer=True))
    axis.set_major_formatter(lambda exponent, _: f"$10^{{{exponent:g}}}$")


def _figure(width: float, height: float, panels: int) -> "tuple[Figure, list[Axes]]":
    """A figure of so many inches, with panels side by side; drawn by Agg, whatever the display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, panels, place + 1) for place in range(panels)]
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.25)
    return figure, axes


def _save(figure: "Figure", path: Path) -> None:
    try:
        figure.savefig(path, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise CommandFailed(f"cannot write the picture: {error}") from error


# Processor time of other processes, as Linux counts it.

PLACES = (13, 14)  # of user and system time among the fields of /proc/PID/stat, from 0


def processor_seconds(process: int) -> float:
    """Of all threads of a process since it began; 0.0 where there is no /proc or no such process."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    # The second field is the command's name in brackets, which may itself hold spaces and brackets.
    fields = ["", "", *text.rpartition(")")[2].split()]
    return sum(int(fields[place]) for place in PLACES) / os.sysconf("SC_CLK_TCK")


def on_core(number: int) -> tuple[str, ...]:
    """What a command is run by so that it has one core to itself; nothing where there is no taskset (util-linux)."""
    cores = sorted(os.sched_getaffinity(0))
    return () if shutil.which("taskset") is None else ("taskset", "-c", str(cores[number % len(cores)]))


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
