"""What `crossdraft bench overlap` found, in numbers and as Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crossdraft.cli.overlap_runs import AnyWay, Outcome
from crossdraft.cli.paired import Ratio, speed_of, speed_ratio
from crossdraft.pipeline.estimates import Estimates

PLAIN, LOCK_STEP = "plain", "lock-step"  # names of ways


@dataclass(frozen=True)
class Conditions:
    """What a table's rows have in common."""

    method: str
    temperature: float
    logit_noise: float  # on the drafter's logits
    delay_ms: float  # to the drafter, one way


@dataclass(frozen=True)
class Measured:
    """One way under some conditions, over all prompts."""

    name: str
    label: str
    tokens: int
    seconds: float
    speed: float  # tokens a second
    ratio: Ratio  # of its speed to plain decoding's
    beside_lock_step: Ratio | None  # ... to that of the best lock-step; None: that was not run
    beside_better: Ratio | None  # ... to that of the faster one of these two
    predicted: float | None  # the ratio to plain decoding that was expected; None: nothing was
    tokens_per_pass: float
    acceptance: float  # of the proposals that were judged
    idle: float  # share of the time in which the target had no pass
    branches_hit: float | None  # share of the refusals that a branch continued; None: no branches
    branch_tokens: float  # proposals in branches, for each emitted token
    row_misses: int
    drafters_lost: int
    bytes_per_token: float

    @property
    def kept(self) -> float | None:
        """The measured ratio, as a share of the predicted one."""
        return None if self.predicted is None else self.ratio.value / self.predicted


@dataclass(frozen=True)
class Cell:
    """All ways under some conditions."""

    conditions: Conditions
    ways: tuple[Measured, ...]
    estimates: Estimates | None  # what the predictions start from


def cell_of(
    conditions: Conditions,
    found: Mapping[AnyWay, Sequence[Outcome]],
    predicted: Mapping[str, float],
    estimates: Estimates | None = None,
) -> Cell:
    """Sums up; `predicted` has ratios to plain decoding by a way's name. Plain decoding must be among the ways."""
    by_name = {way.name: runs for way, runs in found.items()}
    plain, locked = by_name[PLAIN], by_name.get(LOCK_STEP)
    better = plain if locked is None or speed_of(plain) > speed_of(locked) else locked
    return Cell(
        conditions,
        tuple(
            _measured(way, runs, speed_ratio(runs, plain), locked, better, predicted.get(way.name))
            for way, runs in found.items()
        ),
        estimates,
    )


def _measured(
    way: AnyWay,
    runs: Sequence[Outcome],
    ratio: Ratio,
    locked: Sequence[Outcome] | None,
    better: Sequence[Outcome],
    predicted: float | None,
) -> Measured:
    figures = [run.figures for run in runs if run.figures is not None]
    tokens = sum(run.tokens for run in runs)
    judged = sum(sum(one.judged_at) for one in figures)
    tried = sum(one.branches_tried for one in figures)
    lanes = sum(one.target_lane_seconds for one in figures)
    return Measured(
        name=way.name,
        label=way.label,
        tokens=tokens,
        seconds=sum(run.seconds for run in runs),
        speed=speed_of(runs),
        ratio=ratio,
        beside_lock_step=None if locked is None else speed_ratio(runs, locked),
        beside_better=None if locked is None else speed_ratio(runs, better),
        predicted=predicted,
        tokens_per_pass=tokens / max(1, sum(one.passes for one in figures)),
        acceptance=sum(sum(one.accepted_at) for one in figures) / judged if judged else 0.0,
        idle=sum(one.idle_seconds for one in figures) / lanes if lanes else 0.0,
        branches_hit=sum(one.branches_hit for one in figures) / tried if tried else None,
        branch_tokens=sum(one.branch_tokens for one in figures) / max(1, tokens),
        row_misses=sum(one.row_misses for one in figures),
        drafters_lost=sum(one.drafters_lost for one in figures),
        bytes_per_token=sum(one.bytes_sent + one.bytes_received for one in figures) / max(1, tokens),
    )


HEADINGS = (
    *("T", "noise", "delay, ms", "way", "tokens/s", "× plain", "predicted", "kept", "× lock-step", "× the better"),
    *("tokens/pass", "accepted", "idle", "branches hit"),
)


def rows_of(cells: Sequence[Cell]) -> list[tuple[str, ...]]:
    """One row for each way under each of the conditions."""
    return [_row(cell.conditions, way) for cell in cells for way in cell.ways]


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(conditions: Conditions, way: Measured) -> tuple[str, ...]:
    drafts = way.name not in (PLAIN,) and way.acceptance > 0
    return (
        f"{conditions.temperature:g}",
        f"{conditions.logit_noise:g}",
        f"{conditions.delay_ms:g}",
        way.label,
        f"{way.speed:.1f}",
        "1" if way.name == PLAIN else str(way.ratio),
        _optional(way.predicted, ".2f"),
        _optional(way.kept, ".2f"),
        "" if way.beside_lock_step is None or way.name == LOCK_STEP else str(way.beside_lock_step),
        "" if way.beside_better is None or way.name in (PLAIN, LOCK_STEP) else str(way.beside_better),
        f"{way.tokens_per_pass:.2f}" if drafts else "",
        f"{way.acceptance:.1%}" if drafts else "",
        f"{way.idle:.0%}" if way.idle else "",
        _optional(way.branches_hit, ".0%"),
    )


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
