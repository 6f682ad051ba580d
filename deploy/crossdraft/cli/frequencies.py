"""`crossdraft frequencies`: counts how often a corpus uses each token; reads a tokenizer and a config, no weights."""

from pathlib import Path

from rich.markup import escape
from rich.table import Table

from crossdraft.cli.corpora import corpus_texts
from crossdraft.cli.failures import CommandFailed
from crossdraft.cli.outputs import check_output
from crossdraft.cli.show import PlainConsole
from crossdraft.cli.vocabularies import Named
from crossdraft.text.letters import Side
from crossdraft.text.ranking import Ranking, count_frequencies

DIVISORS = (32, 16, 8, 4, 2)  # of the vocabulary, in the summary


def count(model: str, corpus: Path, output: Path) -> None:
    """Counts, writes the file, and prints what a drafter would keep.

    Raises:
        Misused: there is no such corpus, it has no text, or the file cannot be written there.
        CommandFailed: the tokenizer cannot be loaded, or writing fails.
    """
    check_output(output)
    texts = corpus_texts(corpus, "counting")
    named = Named.load(model, Side.DRAFTER)
    try:
        ranking = count_frequencies(named.tokenizer_json, named.tokenization, texts)
        ranking.write(output)
    except OSError as error:
        raise CommandFailed(f"cannot write the frequencies: {error}") from error
    except ValueError as error:
        raise CommandFailed(f"cannot count the tokens of {model}: {error}") from error
    console = PlainConsole(highlight=False)
    told = f"counted {ranking.tokens:,} tokens of {corpus} with {model}; wrote {output}"
    console.print(escape(told), soft_wrap=True)
    console.print(summary(ranking))


def summary(ranking: Ranking) -> Table:
    """The share of the counted tokens that the most frequent ids make."""
    size = len(ranking.counts)
    used = int((ranking.counts > 0).sum())
    kept = sorted({max(1, size // divisor) for divisor in DIVISORS} | {used, size})
    table = Table("--vocab-keep", "of the vocabulary", "of the tokens counted")
    for number in kept:
        note = " (all that occur)" if number == used else ""
        table.add_row(f"{number:,}{note}", f"{number / size:.1%}", f"{ranking.covered(number):.2%}")
    return table
