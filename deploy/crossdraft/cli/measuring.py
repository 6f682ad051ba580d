"""What commands that measure share: the settings that are compared, the figures of generations, tables."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import Any

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from crossdraft.cli.running import CommandFailed, print_whole
from crossdraft.client import Generation, GenerationRequest, Overlap, SamplingOptions, Statistics
from crossdraft.verification.methods import method_named

SEED = 0
NGRAM, REPEATING = 3, 0.2  # an output repeats itself if more than this share of its different n-grams occur again
Columns = Mapping[str, Callable[[Any], object]]  # by heading: what a row of the table shows of a result


@dataclass(frozen=True)
class Setting:
    """A method, a drafter and what they are given."""

    method: str
    drafter: str  # a model's name
    temperature: float
    k: int  # draft tokens in a lock-step round
    options: tuple[str, ...] = ()  # of the drafter's command
    nodes: int = 0  # of a draft tree, of depth k; 0: a chain
    keep: int = 0  # ids of the drafter's LM head; 0: all
    band: int = GenerationRequest.alignment_band
    controlled: bool = False  # a controller decides how far to draft, and says it; K is of no account

    def requests(self, prompts: Sequence[str], max_tokens: int) -> list[GenerationRequest]:
        """One request a prompt, with the same noise in every run. Raises ValueError: a value is out of its range."""
        seed = SEED if method_named(self.method).samples else None
        return [
            GenerationRequest(
                text,
                method=self.method,
                num_speculative_tokens=self.k,
                max_tokens=max_tokens,
                options=SamplingOptions(self.temperature),
                seed=seed,
                choice=number,
                allow_inexact=True,
                alignment_band=self.band,
                overlap=Overlap.AUTO if self.controlled else Overlap.OFF,
                explain=self.controlled,
                tree_nodes=self.nodes,
            )
            for number, text in enumerate(prompts)
        ]


@dataclass(frozen=True)
class Skipped:
    """A method that cannot be used with a drafter."""

    method: str
    drafter: str  # a model's name, or an address
    reason: str  # of the pair: the end of a sentence

    def __str__(self) -> str:
        return f"Skipped {self.method} with {self.drafter}: it {self.reason}"


async def finished(generation: Generation, *, lost: bool = False, came: Callable[[], object] = object) -> Statistics:
    """The figures of a generation, which begins and ends here; `came` is called with each token. Raises CommandFailed:
    there are no figures, or the drafter was lost, unless it may be `lost`."""
    async with generation:
        async for _ in generation:
            came()
    figures = generation.statistics
    if figures is None:
        raise CommandFailed("a generation ended without its statistics")
    if figures.drafter_lost and not lost:
        raise CommandFailed(f"the drafter was lost (overloaded? measure less at once): {figures.drafter_lost}")
    return figures


def total_of(figures: Sequence[Statistics]) -> Statistics:
    """All of at least one generation together: sums, by position in a round where there are several."""
    sums: dict[str, Any] = {"lanes": ()}
    # The first one's, or none.
    first = ("method", "num_speculative_tokens", "drafter_lost", "undrafted", "settings", "drafter", "lanes")
    for name in (one.name for one in fields(Statistics) if one.name not in first):
        values = [getattr(one, name) for one in figures]
        several = isinstance(values[0], tuple)
        sums[name] = tuple(map(sum, zip_longest(*values, fillvalue=0))) if several else sum(values)
    return replace(figures[0], **sums)


def repeats(ids: Sequence[int]) -> bool:
    """Whether an output repeats itself (TokenTiming, Algorithm 5, with its token ids for words)."""
    counts = Counter(zip(*(ids[place:] for place in range(NGRAM)), strict=False))
    return sum(count > 1 for count in counts.values()) > REPEATING * len(counts)


@dataclass(frozen=True)
class Table:
    """A table for people; the first two columns are names, the others figures."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""

    @staticmethod
    def of(results: Iterable[object], columns: Columns, title: str = "") -> "Table":
        """One row for each result."""
        return Table(tuple(columns), tuple(tuple(str(of(one)) for of in columns.values()) for one in results), title)

    def turned(self) -> "Table":
        """With a line for each column, and a column for each line."""
        first, *rest = zip(self.headings, *self.rows, strict=True)
        return Table(first, tuple(rest), self.title)

    def markdown(self) -> str:
        """As Markdown, with its title above it."""
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        title = f"{self.title}\n\n" if self.title else ""
        return title + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def print_table(given: Table) -> None:
    """Prints it on stdout."""
    table = RichTable(title=given.title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(given.headings):
        table.add_column(name, justify="left" if place < 2 else "right", no_wrap=place != 1, overflow="fold")
    for row in given.rows:
        table.add_row(*map(Text, row))  # what a model wrote is no markup
    print_whole(table)
