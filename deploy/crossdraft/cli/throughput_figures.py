"""From outputs that were made at once to figures: tokens a second, latencies, who was busy. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from crossdraft.loadtest.spreads import Spread
from crossdraft.pipeline import Statistics

MILLISECONDS = 1000.0


@dataclass(frozen=True)
class Made:
    """One output."""

    ids: tuple[int, ...]  # of the target
    asked: float  # when it was asked for, in seconds since the run began
    moments: tuple[float, ...]  # when each token came, likewise


@dataclass(frozen=True)
class Model:
    """What the target's service counts, or the difference of two such counts."""

    steps: float = 0.0  # forwards
    jobs: float = 0.0  # of sessions, over all forwards
    tokens: float = 0.0  # fed
    seconds: float = 0.0  # in forwards and draws

    def since(self, before: "Model") -> "Model":
        """What was counted after an earlier count."""
        return Model(
            self.steps - before.steps,
            self.jobs - before.jobs,
            self.tokens - before.tokens,
            self.seconds - before.seconds,
        )


@dataclass(frozen=True)
class Spent:
    """Processor seconds."""

    target: float  # of its process
    drafter: float = 0.0
    here: float = 0.0  # of the process that runs the orchestrator and measures
    loop: float = 0.0  # ... of its event loop's thread


@dataclass(frozen=True)
class Run:
    """All outputs of one way that were made together."""

    outputs: tuple[Made, ...]
    seconds: float
    spent: Spent
    model: Model = Model()
    statistics: tuple[Statistics, ...] = ()  # empty: not ours


@dataclass(frozen=True)
class Measured:
    """One way with so many outputs at once, over all its runs."""

    way: str
    at_once: int
    outputs: int
    tokens: int
    seconds: float
    tokens_per_second: float
    streaming: float | None  # tokens/s while all outputs were under way and had begun; None: there was no such time
    first_token_ms: Spread | None
    per_token_ms: Spread | None  # of each output: from its first token to its last, for each token after the first
    gap_ms: Spread | None  # between any two tokens of an output; those of one pass come together
    end_to_end_ms: Spread | None
    tokens_per_pass: float | None
    acceptance: float | None  # of the judged tokens; None: none was judged
    sessions: float | None  # in a forward of the target, the mean
    fed: float | None  # tokens in a forward, the mean
    busy: float | None  # share of the time that the target was in forwards and draws
    target_cores: float  # processor seconds a second
    drafter_cores: float
    here_cores: float
    loop_cores: float
    here_ms: float  # processor time of this process for a token
    tokens_per_target_second: float  # of its processor: what a busy machine changes least
    same: int | None  # outputs with the ids that the way compared with has; None: nothing to compare


def measured(way: str, at_once: int, runs: Sequence[Run], others: Sequence[Run] = ()) -> Measured:
    """Figures of at least one run; `others` are of the same prompts, to compare ids with."""
    outputs = [made for run in runs for made in run.outputs]
    seconds, tokens = sum(run.seconds for run in runs), sum(len(made.ids) for made in outputs)
    statistics = [one for run in runs for one in run.statistics]
    model = [sum(column) for column in zip(*(_counts(run.model) for run in runs), strict=True)]
    steps, jobs, fed, in_model = model
    spent = [sum(column) / seconds for column in zip(*(_shares(run.spent) for run in runs), strict=True)]
    return Measured(
        way=way,
        at_once=at_once,
        outputs=len(outputs),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        streaming=streaming([run.outputs for run in runs]),
        first_token_ms=Spread.of((made.moments[0] - made.asked for made in outputs), MILLISECONDS),
        per_token_ms=Spread.of(chain.from_iterable(map(_per_token, outputs)), MILLISECONDS),
        gap_ms=Spread.of((end - begin for made in outputs for begin, end in pairwise(made.moments)), MILLISECONDS),
        end_to_end_ms=Spread.of((made.moments[-1] - made.asked for made in outputs), MILLISECONDS),
        tokens_per_pass=_ratio(tokens, sum(one.passes for one in statistics)),
        acceptance=_ratio(
            sum(one.accepted for one in statistics), sum(one.accepted + one.corrected for one in statistics)
        ),
        sessions=_ratio(jobs, steps),
        fed=_ratio(fed, steps),
        busy=in_model / seconds if steps else None,
        target_cores=spent[0],
        drafter_cores=spent[1],
        here_cores=spent[2],
        loop_cores=spent[3],
        here_ms=MILLISECONDS * spent[2] * seconds / tokens,
        tokens_per_target_second=tokens / (spent[0] * seconds) if spent[0] else 0.0,
        same=same_outputs(runs, others) if others else None,
    )


def streaming(runs: Iterable[Sequence[Made]]) -> float | None:
    """Tokens a second between the latest first token and the earliest last one, over runs."""
    tokens, seconds = 0, 0.0
    for outputs in runs:
        first, last = max(made.moments[0] for made in outputs), min(made.moments[-1] for made in outputs)
        if last > first:
            seconds += last - first
            tokens += sum(first < moment <= last for made in outputs for moment in made.moments)
    return tokens / seconds if seconds else None


def same_outputs(runs: Sequence[Run], others: Sequence[Run]) -> int:
    """Outputs of `runs` whose ids are those at the same place in `others`, or their beginning."""
    pairs = ((one, other) for run, beside in zip(runs, others, strict=True) for one, other in _paired(run, beside))
    return sum(one.ids == other.ids for one, other in pairs)


def _paired(run: Run, beside: Run) -> Iterable[tuple[Made, Made]]:
    """One at a time makes fewer outputs: the first ones."""
    return zip(run.outputs, beside.outputs, strict=False)


def _per_token(made: Made) -> Iterable[float]:
    if len(made.moments) > 1:
        yield (made.moments[-1] - made.moments[0]) / (len(made.moments) - 1)


def _counts(model: Model) -> tuple[float, float, float, float]:
    return model.steps, model.jobs, model.tokens, model.seconds


def _shares(spent: Spent) -> tuple[float, float, float, float]:
    return spent.target, spent.drafter, spent.here, spent.loop


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
