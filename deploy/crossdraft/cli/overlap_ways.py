"""The ways to decode that `crossdraft bench overlap` compares."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from crossdraft.cli.benching import SEED
from crossdraft.pipeline import GenerationRequest, SamplingOptions
from crossdraft.pipeline.governing import PLAIN as PLAIN_CHOICE
from crossdraft.pipeline.governing import Choice, lock_step
from crossdraft.pipeline.request import Overlap
from crossdraft.verification.methods import method_named


@dataclass(frozen=True)
class Way:
    """One way to decode; without a choice the governor decides."""

    name: str  # what it is called in tables: plain, lock-step, overlapped ...
    choice: Choice | None

    @property
    def drafts(self) -> bool:
        """Whether it needs a drafter."""
        return self.choice is None or self.choice.drafts

    @property
    def label(self) -> str:
        """Its name and numbers."""
        if self.choice is None or not self.choice.drafts:
            return self.name
        if not self.choice.overlap:
            return f"{self.name}, K = {self.choice.window}"
        numbers = f"{self.name}, {self.choice.window}/{self.choice.wait}"
        depth, width = self.choice.branch_depth, self.choice.branch_width
        return f"{numbers}, branches {depth}×{width}" if depth else numbers


PLAIN = Way("plain", PLAIN_CHOICE)
GOVERNED = Way("governed", None)


def lock_steps(ks: Sequence[int]) -> tuple[Way, ...]:
    """The classic round with each number of proposals."""
    return tuple(Way("lock-step", lock_step(k).choice) for k in ks)


def overlapped(windows: Sequence[tuple[int, int]]) -> tuple[Way, ...]:
    """The drafter drafts on, within each window and with each wait."""
    return tuple(Way("overlapped", Choice(window, wait)) for window, wait in windows)


def branched(way: Way, shapes: Sequence[tuple[int, int]]) -> tuple[Way, ...]:
    """The same way with prepared continuations of each depth and width."""
    assert way.choice is not None
    window, wait = way.choice.window, way.choice.wait
    return tuple(
        Way("with branches", Choice(window, wait, branch_depth=depth, branch_width=width)) for depth, width in shapes
    )


@dataclass(frozen=True)
class Task:
    """What is generated, whatever the way."""

    prompts: tuple[str, ...]
    method: str | None  # None: the default
    temperature: float
    max_tokens: int
    row_width: int = 64  # ids of a proposal's row

    def request(self, way: Way, number: int, max_tokens: int | None = None) -> GenerationRequest:
        """For the prompt of this number. Where the method takes a seed, each prompt has the same noise in every run.

        Raises:
            ValueError: a value is out of its range.
        """
        plain = GenerationRequest(
            self.prompts[number],
            method=self.method,
            max_tokens=max_tokens or self.max_tokens,
            options=SamplingOptions(self.temperature),
            seed=SEED if self.method and method_named(self.method).seedable else None,
            choice=number,
            row_width=self.row_width,
            allow_inexact=True,
        )
        return plain if way.choice is None or not way.choice.drafts else _chosen(plain, way.choice)


def _chosen(request: GenerationRequest, choice: Choice) -> GenerationRequest:
    if not choice.overlap:
        return replace(request, overlap=Overlap.OFF, k=choice.window)
    return replace(
        request,
        overlap=Overlap.ON,
        window=choice.window,
        wait=choice.wait,
        branches=choice.branch_depth,
        branch_width=choice.branch_width,
    )
