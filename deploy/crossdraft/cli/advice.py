"""What `crossdraft select` found, and which of it to use."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from crossdraft.cli.benching import print_table
from crossdraft.models.names import BUNDLED_PREFIX

COLUMNS = ("drafter", "method", "accepted", "draft/pass", "tokens/pass", "best K", "expected", "measured", "tokens/s")
CERTAIN = 2.0  # standard errors by which a gain must exceed nothing: the fastest of many is partly the luckiest


@dataclass(frozen=True)
class Candidate:
    """One drafter and method, as measured."""

    drafter: str  # as it was given: a model's name or HOST:PORT
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
    model: str = ""  # the name that a service gives its model; empty: `drafter` is the name

    @property
    def name(self) -> str:
        """The drafter, in tables."""
        return short(self.model or self.drafter)

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.name}, {self.method}"


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
            f"Use {_used(best)}: {_speed(best)} times as fast as no drafter "
            f"({best.tokens_per_second:.1f} against {best.plain_tokens_per_second:.1f} tokens/s)."
        )
    nearest = max(candidates, key=lambda one: one.measured)
    doubtful = nearest.measured > 1
    verdict = "None is shown to help" if doubtful else "None helps, decode without a drafter"
    doubt = ", which may be chance: measure more prompts (--limit)" if doubtful else ""
    return (
        f"{verdict}: the best, {_used(nearest)}, is {_speed(nearest)} times as fast{doubt}; a proposal costs "
        f"{nearest.draft_cost:.2f} of a pass, and a pass yields {nearest.tokens_per_pass:.2f} tokens."
    )


def _used(one: Candidate) -> str:
    model = f" ({one.name})" if one.name not in (one.drafter, short(one.drafter)) else ""
    return f"{one.drafter}{model} with method {one.method} and K = {one.best_k}"


def told_apart(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The same, without the name of a model that several of the drafters have: they go by their addresses."""
    names = Counter(name for _, name in {(one.drafter, one.name) for one in candidates})
    return [replace(one, model="") if names[one.name] > 1 else one for one in candidates]


def print_report(title: str, candidates: Sequence[Candidate], skipped: Sequence[Skipped]) -> None:
    """A table, the fastest first, what was skipped, and what to use."""
    print_table(title, COLUMNS, [_row(one) for one in sorted(candidates, key=lambda one: -one.measured)])
    for one in skipped:
        print(f"Skipped {one.method} with {one.drafter}: it {one.reason}")
    print(advice(candidates))


def _row(one: Candidate) -> tuple[str, ...]:
    return (
        one.name,
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
    """A model's name in tables; of a folder's whole path its last part."""
    return PurePath(name).name if PurePath(name).is_absolute() else name.removeprefix(BUNDLED_PREFIX)
