"""`crossdraft affinity` and `crossdraft frequencies`: files made from a corpus. They read tokenizers, no weights."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table

from crossdraft.cli.options import AffinityOptions
from crossdraft.console.corpora import Named, corpus_texts
from crossdraft.console.running import CommandFailed, PlainConsole, UsageError, check_output
from crossdraft.text.affinity import Affinity, Matrix, Probabilities, save_affinity
from crossdraft.text.affinity_estimates import Alignment, Windows, co_occurrence
from crossdraft.text.frequencies import TokenFrequencies, count_frequencies
from crossdraft.text.letters import Side
from crossdraft.text.pairs import Pair
from crossdraft.text.tokenization import Tokenization

NEIGHBOURS = 64  # target tokens, at most, that the probability of a draft token is spread over
WINDOW = 8  # target tokens in which two co-occur
TEMPERATURE = 1e-4  # τ of Eq. 2: covariances are of this size
DIVISORS = (32, 16, 8, 4, 2)  # of the vocabulary's size: rows of the summary of `frequencies`


def make_affinity(target: str, drafter: str, corpus: Path, output: Path, options: AffinityOptions) -> None:
    """Estimates the matrix, writes the file and prints what is in it.

    Raises:
        UsageError: there is no such corpus, it has no text, an option does not fit, or the file cannot be written.
        CommandFailed: a tokenizer cannot be loaded, nothing is shared, or writing fails.
    """
    _check(options)
    check_output(output)
    ours, theirs = Named.load(target, Side.TARGET), Named.load(drafter, Side.DRAFTER)
    pair = Pair(ours.tokenization.vocabulary, theirs.tokenization.vocabulary)
    if not len(pair.shared_drafter_ids):
        raise CommandFailed(f"{target} and {drafter} share no token, so rdk cannot be used; use coupled")
    make = _aligned if options.kind == "aligned" else _co_occurrence
    try:
        matrix, note = make(pair, ours.tokenization, theirs.tokenization, corpus_texts(corpus, "reading"), options)
        affinity = Affinity.of(pair, matrix, ours.tokenizer_json, theirs.tokenizer_json, f"{options.kind}, {note}")
        save_affinity(affinity, output)
    except (ValueError, OSError) as error:
        raise CommandFailed(f"cannot make the affinities: {error}") from error
    console = PlainConsole(highlight=False)
    console.print(escape(f"wrote {output}: {options.kind}, {note}"), soft_wrap=True)
    console.print(summary(affinity, pair))


def _check(options: AffinityOptions) -> None:
    """Raises UsageError if an option was given that this kind does not have, or is out of its range."""
    for name in ("window", "temperature"):
        if getattr(options, name) is not None and options.kind == "aligned":
            raise UsageError(f"--{name} is not an option of --kind {options.kind}: leave it out")
    if not (options.temperature is None or 0 < options.temperature < float("inf")):
        raise UsageError(f"--temperature must be above 0, got {options.temperature}")


def summary(affinity: Affinity, pair: Pair) -> Table:
    """What a matrix does with the probability of a draft token."""
    table = Table(show_header=False)
    table.add_row("draft tokens that the target has", f"{len(affinity.matrix.drafter_ids):,}")
    for name, value in _figures(affinity.matrix, pair):
        table.add_row(name, value)
    return table


def _figures(matrix: Matrix, pair: Pair) -> list[tuple[str, str]]:
    rows = np.diff(matrix.starts)
    own = np.repeat(pair.to_target_ids(matrix.drafter_ids), rows) == matrix.target_ids
    outside = ~np.isin(matrix.target_ids, pair.to_target_ids(matrix.drafter_ids))
    return [
        (
            "target tokens that a draft token can stand for",
            f"{len(np.unique(matrix.target_ids)):,} of {pair.target.size:,}",
        ),
        ("entries", f"{len(matrix.weights):,}"),
        ("draft tokens that stand for themselves only", f"{int(((rows == 1) & (_sums(own, matrix) > 0)).sum()):,}"),
        ("probability that a token keeps, mean", f"{_sums(own, matrix).mean():.1%}"),
        ("probability that goes to tokens the drafter lacks, mean", f"{_sums(outside, matrix).mean():.1%}"),
    ]


def _sums(chosen: NDArray[np.bool_], matrix: Matrix) -> Probabilities:
    """The total weight of the chosen entries of each row."""
    return np.add.reduceat(np.where(chosen, matrix.weights, 0.0), matrix.starts[:-1])


def _aligned(
    pair: Pair, target: Tokenization, drafter: Tokenization, texts: Iterable[str], options: AffinityOptions
) -> tuple[Matrix, str]:
    found = Alignment(pair, target, drafter)
    size = 0
    for text in texts:
        found.add(text)
        size += len(text)
    if found.left_out == size:
        raise ValueError("one of the tokenizers changes text, so that no line of the corpus is the same for both")
    note = f"; left out {found.left_out:,} that a tokenizer changes" if found.left_out else ""
    return found.matrix(options.neighbours or NEIGHBOURS), f"from {size:,} characters{note}"


def _co_occurrence(
    pair: Pair, target: Tokenization, _: Tokenization, texts: Iterable[str], options: AffinityOptions
) -> tuple[Matrix, str]:
    length, temperature = options.window or WINDOW, options.temperature or TEMPERATURE
    windows = Windows(target, length)
    for text in texts:
        windows.add(text)
    note = f"; {windows.forgotten:,} occurrences of rare pairs not counted" if windows.forgotten else ""
    matrix = co_occurrence(pair, windows, temperature, options.neighbours or NEIGHBOURS)
    return matrix, f"τ = {temperature:g}, windows of {length} target tokens{note}"


def count_tokens(model: str, corpus: Path, output: Path) -> None:
    """Counts the tokens of a corpus, writes the file, and prints which share of them a pruned head would keep.

    Raises:
        UsageError: there is no such corpus, it has no text, or the file cannot be written there.
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
    done = f"counted {ranking.tokens:,} tokens of {corpus} with {model}; wrote {output}"
    console.print(escape(done), soft_wrap=True)
    console.print(_kept_shares(ranking))


def _kept_shares(ranking: TokenFrequencies) -> Table:
    """The share of the counted tokens that the N most frequent ids make, for some N."""
    size = len(ranking.counts)
    used = int((ranking.counts > 0).sum())
    kept = sorted({max(1, size // divisor) for divisor in DIVISORS} | {used, size})
    table = Table("--vocab-keep", "of the vocabulary", "of the tokens counted")
    for number in kept:
        note = " (all that occur)" if number == used else ""
        table.add_row(f"{number:,}{note}", f"{number / size:.1%}", f"{ranking.covered(number):.2%}")
    return table
