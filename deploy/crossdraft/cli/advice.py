"""What `crossdraft select` found, and which of it to use."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from crossdraft.cli.benching import print_table
from crossdraft.models.names import BUNDLED_PREFIX

COLUMNS = ("drafter", "method", "accepted", "draft/pass", "tokens/pass", "best K", "expected", "measured", "tokens/s")
CERTAIN = 2.0  # standard errors by which a gain must exceed nothing: the fastest of many is partly the luckiest


@dataclass(frozen=True)
class Candidate:
    """One drafter and method, as measured."""

    drafter: str
    method: str
    acceptance: float  # share of the judged tokens that agreed with the draft, at the largest K
    draft_cost: float  # seconds of a proposal in the drafter's model, in plain passes of the target
    tokens_per_pass: float  # at the best K
    best_k: int  # by the cost model
    expected: dict[int, float] = field(hash=False)  # speed by K, of that without a drafter
    measured: float  # speed at the best K, of the same prompts without a drafter, run in turns
    error: float  # standard, of `measured`, over prompts
    tokens_per_second: float  # at the best K
    plain_tokens_per_second: float  # without a drafter, in the same turns

    @property
    def label(self) -> str:
        """For people."""
        return f"{short(self.drafter)}, {self.method}"


@dataclass(frozen=True)
class Skipped:
    """A method that a pair refuses."""

    drafter: str
    method: str
    reason: str


def best_of(candidates: Sequence[Candidate]) -> Candidate | None:
    """The fastest one of those that are faster than no drafter beyond doubt."""
    helping = [one for one in candidates if one.measured - CERTAIN * one.error > 1]
    return max(helping, key=lambda one: one.measured, default=None)


def advice(candidates: Sequence[Candidate]) -> str:
    """One sentence: what to use."""
    if not candidates:
        return "None helps: no method can be used with these drafters."
    best = best_of(candidates)
    if best is not None:
        return (
            f"Use {best.drafter} with method {best.method} and K = {best.best_k}: {_speed(best)} times as fast as "
            f"no drafter ({best.tokens_per_second:.1f} against {best.plain_tokens_per_second:.1f} tokens/s)."
        )
    nearest = max(candidates, key=lambda one: one.measured)
    doubt = "; what it gains is within the error, measure more prompts (--limit)" if nearest.measured > 1 else ""
    return (
        f"None helps, decode without a drafter: the best, {nearest.drafter} with method {nearest.method} and "
        f"K = {nearest.best_k}, is {_speed(nearest)} times as fast; a proposal costs {nearest.draft_cost:.2f} of a "
        f"pass, and a pass yields {nearest.tokens_per_pass:.2f} tokens{doubt}."
    )


def print_report(title: str, candidates: Sequence[Candidate], skipped: Sequence[Skipped]) -> None:
    """A table, the fastest first, what was skipped, and what to use."""
    print_table(title, COLUMNS, [_row(one) for one in sorted(candidates, key=lambda one: -one.measured)])
    for one in skipped:
        print(f"Skipped {one.method} with {one.drafter}: it {one.reason}")
    print(advice(candidates))


def _row(one: Candidate) -> tuple[str, ...]:
    return (
        short(one.drafter),
        one.method,
        f"{one.acceptance:.1%}",
        f"{one.draft_cost:.2f}",
        f"{one.tokens_per_pass:.2f}",
        str(one.best_k),
        f"{one.expected[one.best_k]:.2f} ×",
        f"{_speed(one)} ×",
        f"{one.tokens_per_second:.1f} ({one.plain_tokens_per_second:.1f})",
    )


def _speed(one: Candidate) -> str:
    return f"{one.measured:.2f} ± {one.error:.2f}"


def short(name: str) -> str:
    """A model's name in tables."""
    return name.removeprefix(BUNDLED_PREFIX)
