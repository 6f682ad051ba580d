"""`crossdraft demo`: the bundled pair, then its target alone, side by side."""

from dataclasses import dataclass, replace

from rich.table import Table
from rich.text import Text

from crossdraft.cli.display import STYLES, VISIBLE, legend, rows_of
from crossdraft.cli.generate import addresses, read_prompt
from crossdraft.client import GenerationRequest, Overlap, Pipeline, SamplingOptions, Statistics, Token, connect
from crossdraft.console.processes import ModelNames
from crossdraft.console.running import PlainConsole, checked_options, run_to_end

WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Outcome:
    """One of the two generations."""

    text: str
    tokens: tuple[Token, ...]
    statistics: Statistics


def demo(
    prompt: str | None, k: int, max_tokens: int, temperature: float, seed: int, models: ModelNames | None = None
) -> None:
    """Generates twice, greedily or with the same seed, and compares: both texts must be equal.

    Raises:
        UsageError: a value is out of its range.
        CommandFailed: a service does not start, or fails.
    """
    with checked_options():
        request = GenerationRequest(
            read_prompt(prompt),
            num_speculative_tokens=k,
            max_tokens=max_tokens,
            options=SamplingOptions(temperature),
            seed=seed,
            overlap=Overlap.OFF,
        )
    run_to_end(_demo(request, models or ModelNames()))


async def _demo(request: GenerationRequest, models: ModelNames) -> None:
    notes = PlainConsole(stderr=True, highlight=False)
    notes.print(f"starting a target ({models.target}) and a drafter ({models.drafter}) on this machine")
    async with addresses(None, None, models) as (target, drafter):
        notes.print("generating with the drafter, then without")
        drafted = await _outcome(target, drafter, request)
        plain = await _outcome(target, None, request)
    out = PlainConsole(highlight=False)
    out.print(Text(str(request.prompt).translate(VISIBLE), "dim"))
    out.print(_side_by_side(drafted, plain))
    out.print(legend())
    out.print(_speed(drafted.statistics, plain.statistics))
    out.print(comparison(drafted.text, plain.text))


async def _outcome(target: str, drafter: str | None, request: GenerationRequest) -> Outcome:
    async with connect(target, drafter, needs_drafter=drafter is not None) as pipeline:
        # The first passes of a process are slow, and would count against whichever generation is first.
        await _generated(pipeline, replace(request, max_tokens=WARM_UP_TOKENS))
        return await _generated(pipeline, request)


async def _generated(pipeline: Pipeline, request: GenerationRequest) -> Outcome:
    async with pipeline.run(request) as generation:
        tokens = tuple([token async for token in generation])
    assert generation.statistics is not None
    return Outcome(generation.text, tokens, generation.statistics)


def _side_by_side(drafted: Outcome, plain: Outcome) -> Table:
    table = Table("", "with the drafter", "without")
    table.add_row("text", _coloured(drafted), _coloured(plain), end_section=True)
    for (name, with_drafter), (_, without) in zip(rows_of(drafted.statistics), rows_of(plain.statistics), strict=True):
        table.add_row(name, with_drafter, without)
    return table


def _coloured(outcome: Outcome) -> Text:
    text = Text()
    for token in outcome.tokens:
        text.append(token.text.translate(VISIBLE), STYLES[token.kind])
    return text


def _speed(drafted: Statistics, plain: Statistics) -> str:
    ratio = drafted.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0
    figures = f"{ratio:.2f} times the tokens/s, {drafted.tokens_per_pass:.2f} tokens per pass of the target"
    if ratio >= 1 or not drafted.epochs or not drafted.target_seconds:
        return figures
    cost = (drafted.drafter_seconds / drafted.epochs) / (drafted.target_seconds / drafted.passes)
    return f"{figures}; a draft took {cost:.1f} passes of this small target, and pays where the target is far larger"


def comparison(drafted: str, plain: str) -> str:
    """Whether two texts are equal, and if not, from where on."""
    if drafted == plain:
        return "the texts are equal"
    same = next((at for at, pair in enumerate(zip(drafted, plain, strict=False)) if pair[0] != pair[1]), None)
    place = min(len(drafted), len(plain)) if same is None else same
    return f"the texts DIFFER from character {place} on, as they may only where two tokens are equally probable"
