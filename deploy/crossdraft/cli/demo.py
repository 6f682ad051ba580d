"""`crossdraft demo`: a target with a drafter and without, side by side, greedily and sampled."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from crossdraft.cli.display import STYLES, TAKEN, VISIBLE, legend, rows_of
from crossdraft.cli.generate import read_prompt, services
from crossdraft.cli.processes import patience
from crossdraft.cli.running import PlainConsole, checked_options, run_to_end
from crossdraft.client import GenerationRequest, Overlap, Pipeline, SamplingOptions, Statistics, Token, connect
from crossdraft.config.commands import WhereToGenerate
from crossdraft.engine.names import LABORATORY
from crossdraft.text.letters import common_length

# More and wider layers that compute zeros: the same texts at the price of a larger model. Wheels have no laboratory.
PADDED = find_spec(LABORATORY) is not None
MODELS: dict[str, Any] = {
    "target_model": "inflated:16x1024:bundled:target" if PADDED else "bundled:target",
    "drafter_model": "bundled:drafter-a",
    **{"device": "cpu", "cache_mib": 256, "threads": 1},  # a thread for each model: alike on every machine
}
PROMPT = (
    "class Point:\n    @property\n    def x(self):\n        return self._x\n\n    @x.setter\n    def x(self, value):\n"
    "        self._x = value\n\n    @property\n    def y(self):\n        return self._y\n\n    @y.setter\n"
)
WARM_UP_TOKENS = 16  # with each: the first passes of a process, and of each size, are slow
TURNS = 3  # with the drafter and without; the median counts, as a machine may be busy with something else
DEFAULTS = "The default prompt, seed, draft tokens and target suit this drafter: `crossdraft select` measures yours."
SHOWN = ("tokens/s", "passes of the target", "tokens per pass", TAKEN)


class DemoOutput(NamedTuple):
    """One generation."""

    tokens: tuple[Token, ...]
    statistics: Statistics

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)


Turn = tuple[DemoOutput, DemoOutput]  # of the same request, with the drafter and without


def speedup(turn: Turn) -> float:
    """How many times the tokens/s the drafter brings."""
    drafted, plain = (one.statistics.tokens_per_second for one in turn)
    return drafted / plain if plain else 0.0


def demo(prompt: str | None, k: int, max_tokens: int, temperature: Sequence[float], seed: int) -> None:
    """Generates with a drafter and without at each temperature, and compares: both texts must be equal."""
    with checked_options():
        request = GenerationRequest(
            PROMPT if prompt is None else read_prompt(prompt),
            num_speculative_tokens=k,
            max_tokens=max_tokens,
            seed=seed,
            overlap=Overlap.OFF,  # the controller would need longer than a demonstration to find such a number
            paths=1,
        )
        requests = [replace(request, options=SamplingOptions(one)) for one in temperature]
    run_to_end(_demo(requests))


async def _demo(requests: Sequence[GenerationRequest]) -> None:
    notes, out = PlainConsole(stderr=True, highlight=False), PlainConsole(highlight=False)
    if not PADDED:
        notes.print("the target is as small as it is: only a checkout can pad it to a larger one", soft_wrap=True)
    found = []
    async with (
        services(WhereToGenerate(**MODELS)) as (target, drafter),
        connect(target, drafter, patience(), needs_drafter=True) as pipeline,
        connect(target, patience=patience()) as alone,
    ):
        rounds = f"lock-step rounds of {requests[0].num_speculative_tokens} draft tokens"
        notes.print(f"generating with the drafter ({rounds}) and without, {TURNS} times in turns", soft_wrap=True)
        for request in requests:
            for warmed in (pipeline, alone):
                await _generated(warmed, replace(request, max_tokens=min(WARM_UP_TOKENS, request.max_tokens)))
            turns = [(await _generated(pipeline, request), await _generated(alone, request)) for _ in range(TURNS)]
            turns.sort(key=speedup)
            found.append(turns[TURNS // 2])
            _show(out, request, turns)
    out.print(legend(), soft_wrap=True)
    out.print(explanation(found), soft_wrap=True)


async def _generated(pipeline: Pipeline, request: GenerationRequest) -> DemoOutput:
    async with pipeline.run(request) as generation:
        tokens = tuple([token async for token in generation])
    assert generation.statistics is not None
    return DemoOutput(tokens, generation.statistics)


def _show(out: PlainConsole, request: GenerationRequest, turns: Sequence[Turn]) -> None:
    (drafted, plain), temperature = turns[len(turns) // 2], request.options.temperature
    least, median, most = (f"{speedup(turns[place]):.2f}" for place in (0, len(turns) // 2, -1))
    out.print(f"temperature {temperature:g}" + (f", seed {request.seed}:" if temperature else " (greedy):"))
    text = Text(str(request.prompt).translate(VISIBLE), "dim")
    for token in drafted.tokens:
        text.append(token.text.translate(VISIBLE), STYLES[token.kind])
    out.print(text)
    table = Table("", "with the drafter", "without")
    for (name, with_drafter), (_, without) in zip(rows_of(drafted.statistics), rows_of(plain.statistics), strict=True):
        if name in SHOWN:
            table.add_row(name, with_drafter, without)
    out.print(table)
    other = next((one.text for turn in turns for one in turn if one.text != plain.text), plain.text)
    out.print(f"{median} times the tokens/s ({least} to {most}); {comparison(other, plain.text)}\n")


def explanation(found: Sequence[Turn]) -> str:
    """One sentence: why it is faster, or why not."""
    drafted = [one.statistics for one, _ in found]
    tokens = sum(one.tokens for one in drafted) / sum(one.passes for one in drafted)
    why = f"a pass of the target over the drafter's tokens yielded {tokens:.1f} tokens where it yields 1 without one"
    slower = f"not faster here although {why}: drafting, or the larger passes, took the time that this saves"
    said = f"faster because {why}, and costs little more" if all(speedup(one) > 1 for one in found) else slower
    return f"It is {said}. {DEFAULTS}"


def comparison(drafted: str, plain: str) -> str:
    """Whether two texts are equal, and if not, from where on."""
    if drafted == plain:
        return "the texts are equal"
    place = common_length(drafted, plain)
    return f"the texts DIFFER from character {place} on, as they may only where two tokens are equally probable"
