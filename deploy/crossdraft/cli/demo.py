"""`crossdraft demo`: a target with a drafter and without, side by side, greedily and sampled."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.table import Table
from rich.text import Text

from crossdraft.cli.display import STYLES, VISIBLE, legend, rows_of
from crossdraft.cli.generate import addresses, read_prompt
from crossdraft.client import GenerationRequest, Overlap, Pipeline, SamplingOptions, Statistics, Token, connect
from crossdraft.console.processes import DEMO, EngineOptions, ModelNames
from crossdraft.console.running import PlainConsole, checked_options, run_to_end

# The bundled target with more and wider layers, which compute zeros: the same texts at the price of a larger model.
MODELS = ModelNames("inflated:16x1024:bundled:target", "bundled:drafter-a")
PROMPT = (
    "class Point:\n    @property\n    def x(self):\n        return self._x\n\n    @x.setter\n    def x(self, value):\n"
    "        self._x = value\n\n    @property\n    def y(self):\n        return self._y\n\n    @y.setter\n"
)
WARM_UP_TOKENS = 16  # with each: the first passes of a process, and of each size, are slow
TURNS = 3  # with the drafter and without; the median counts, as a machine may be busy with something else
CHOSEN = (
    "Prompt, seed, the target's size and the number of draft tokens were chosen to suit this drafter; `crossdraft select` "
    "measures your own."
)
SHOWN = ("tokens/s", "passes of the target", "tokens per pass", "acceptance")


@dataclass(frozen=True)
class Outcome:
    """One of the two generations."""

    text: str
    tokens: tuple[Token, ...]
    statistics: Statistics


@dataclass(frozen=True)
class Compared:
    """The same request with the drafter and without."""

    drafted: Outcome
    plain: Outcome

    @property
    def speedup(self) -> float:
        """How many times the tokens/s the drafter brings."""
        plain = self.plain.statistics.tokens_per_second
        return self.drafted.statistics.tokens_per_second / plain if plain else 0.0


def demo(
    prompt: str | None,
    k: int,
    max_tokens: int,
    temperatures: Sequence[float],
    seed: int,
    engine: EngineOptions = DEMO,
    models: ModelNames = MODELS,
) -> None:
    """Generates with a drafter and without at each temperature, and compares: both texts must be equal.

    Raises:
        UsageError: a value is out of its range.
        CommandFailed: a service does not start, or fails.
    """
    with checked_options():
        request = GenerationRequest(
            PROMPT if prompt is None else read_prompt(prompt),
            num_speculative_tokens=k,
            max_tokens=max_tokens,
            seed=seed,
            overlap=Overlap.OFF,  # the controller would need longer than a demonstration to find such a number
            paths=1,
        )
        requests = [replace(request, options=SamplingOptions(temperature)) for temperature in temperatures]
    run_to_end(_demo(requests, engine, models))


async def _demo(requests: Sequence[GenerationRequest], engine: EngineOptions, models: ModelNames) -> None:
    notes, out = PlainConsole(stderr=True, highlight=False), PlainConsole(highlight=False)
    notes.print(f"starting a target ({models.target}) and a drafter ({models.drafter}) on this machine", soft_wrap=True)
    found = []
    async with (
        addresses(None, None, models, engine) as (target, drafter),
        connect(target, drafter, needs_drafter=True) as pipeline,
        connect(target) as alone,
    ):
        rounds = f"lock-step rounds of {requests[0].num_speculative_tokens} draft tokens"
        notes.print(f"generating with the drafter ({rounds}) and without, {TURNS} times in turns", soft_wrap=True)
        for request in requests:
            for warmed in (pipeline, alone):
                await _generated(warmed, replace(request, max_tokens=min(WARM_UP_TOKENS, request.max_tokens)))
            turns = [
                Compared(await _generated(pipeline, request), await _generated(alone, request)) for _ in range(TURNS)
            ]
            turns.sort(key=lambda one: one.speedup)
            found.append(turns[TURNS // 2])
            _show(out, request, turns)
    out.print(legend(), soft_wrap=True)
    out.print(explanation(found), soft_wrap=True)


async def _generated(pipeline: Pipeline, request: GenerationRequest) -> Outcome:
    async with pipeline.run(request) as generation:
        tokens = tuple([token async for token in generation])
    assert generation.statistics is not None
    return Outcome(generation.text, tokens, generation.statistics)


def _show(out: PlainConsole, request: GenerationRequest, turns: Sequence[Compared]) -> None:
    median = turns[len(turns) // 2]
    drafted, plain = median.drafted, median.plain
    temperature = request.options.temperature
    out.print(f"temperature {temperature:g}" + (f", seed {request.seed}:" if temperature else " (greedy):"))
    out.print(_coloured(request, drafted))
    table = Table("", "with the drafter", "without")
    for (name, with_drafter), (_, without) in zip(rows_of(drafted.statistics), rows_of(plain.statistics), strict=True):
        if name in SHOWN:
            table.add_row(name, with_drafter, without)
    out.print(table)
    speeds = f"{median.speedup:.2f} times the tokens/s ({turns[0].speedup:.2f} to {turns[-1].speedup:.2f})"
    texts = (one.text for turn in turns for one in (turn.drafted, turn.plain))
    other = next((text for text in texts if text != plain.text), plain.text)
    out.print(f"{speeds}; {comparison(other, plain.text)}\n")


def _coloured(request: GenerationRequest, outcome: Outcome) -> Text:
    text = Text(str(request.prompt).translate(VISIBLE), "dim")
    for token in outcome.tokens:
        text.append(token.text.translate(VISIBLE), STYLES[token.kind])
    return text


def explanation(found: Sequence[Compared]) -> str:
    """One sentence: why it is faster, or why not."""
    drafted = [one.drafted.statistics for one in found]
    tokens = sum(one.tokens for one in drafted) / sum(one.passes for one in drafted)
    why = (
        f"a pass of the target over the draft's tokens yielded {tokens:.1f} tokens where it yields 1 without a drafter"
    )
    if all(one.speedup > 1 for one in found):
        return f"It is faster because {why}, and costs little more. {CHOSEN}"
    return (
        f"It is not faster here although {why}: drafting, or the larger passes, took the time that this saves. {CHOSEN}"
    )


def comparison(drafted: str, plain: str) -> str:
    """Whether two texts are equal, and if not, from where on."""
    if drafted == plain:
        return "the texts are equal"
    same = next((at for at, pair in enumerate(zip(drafted, plain, strict=False)) if pair[0] != pair[1]), None)
    place = min(len(drafted), len(plain)) if same is None else same
    return f"the texts DIFFER from character {place} on, as they may only where two tokens are equally probable"
