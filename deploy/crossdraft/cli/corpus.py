"""`crossdraft affinity` and `crossdraft frequencies`: files made from a corpus. They read tokenizers, no weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table

from crossdraft.cli.options import AffinityOptions, Kinds
from crossdraft.console.corpora import Named, corpus_texts
from crossdraft.console.running import CommandFailed, PlainConsole, UsageError, check_output
from crossdraft.text.affinity import Affinity, FirstOrder, Kernel, Matrix, Probabilities, save_affinity
from crossdraft.text.affinity_estimates import Alignment, Windows, co_occurrence, first_pieces
from crossdraft.text.frequencies import TokenFrequencies, count_frequencies
from crossdraft.text.letters import Side
from crossdraft.text.pairs import Pair

NEIGHBOURS = 64  # target tokens, at most, that the probability of a draft token is spread over
WINDOW = 8  # target tokens in which two co-occur
TEMPERATURE = 1e-4  # τ of Eq. 2: covariances are of this size
DIVISORS = (32, 16, 8, 4, 2)  # of the vocabulary's size: rows of the summary of `frequencies`


@dataclass(frozen=True, eq=False)
class Job:
    """What an affinity matrix is made from."""

    target: Named
    drafter: Named
    pair: Pair
    corpus: Path
    options: AffinityOptions

    @property
    def neighbours(self) -> int:
        """Entries of a row."""
        return self.options.neighbours or NEIGHBOURS

    def texts(self) -> Iterator[str]:
        return corpus_texts(self.corpus, "reading")

    def frequencies(self) -> TokenFrequencies:
        """How often the target's tokens occur in the corpus."""
        return count_frequencies(self.target.tokenizer_json, self.target.tokenization, self.texts())


def make_affinity(target: str, drafter: str, corpus: Path, output: Path, options: AffinityOptions) -> None:
    """Estimates the matrix, writes the file and prints what is in it.

    Args:
        target: a folder, a hub id or a bundled model.
        drafter: likewise.
        corpus: a file or a folder of text.
        output: the file.
        options: how the matrix is made.

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
    job = Job(ours, theirs, pair, corpus, options)
    try:
        kernel, note = BUILDERS[options.kind](job)
        affinity = Affinity.of(pair, kernel, ours.tokenizer_json, theirs.tokenizer_json, f"{options.kind}, {note}")
        save_affinity(affinity, output)
    except (ValueError, OSError) as error:
        raise CommandFailed(f"cannot make the affinities: {error}") from error
    console = PlainConsole(highlight=False)
    console.print(escape(f"wrote {output}: {options.kind}, {note}"), soft_wrap=True)
    console.print(summary(affinity, pair))


def _check(options: AffinityOptions) -> None:
    """Raises UsageError if an option was given that this kind does not have, or is out of its range."""
    given = [name for name, value in vars(options).items() if value is not None and name != "kind"]
    for name in given:
        if name not in TAKES[options.kind]:
            raise UsageError(f"--{name} is not an option of --kind {options.kind}: leave it out")
    if not 0 <= (options.keep or 0) <= 1:
        raise UsageError(f"--keep must be between 0 and 1, got {options.keep}")
    if not (options.temperature is None or 0 < options.temperature < float("inf")):
        raise UsageError(f"--temperature must be above 0, got {options.temperature}")


def summary(affinity: Affinity, pair: Pair) -> Table:
    """What a matrix does with the probability of a draft token."""
    table = Table(show_header=False)
    table.add_row("draft tokens that the target has", f"{len(affinity.drafter_ids):,}")
    for name, value in _figures(affinity.kernel, pair):
        table.add_row(name, value)
    return table


def _figures(kernel: Kernel, pair: Pair) -> list[tuple[str, str]]:
    reached = "target tokens that a draft token can stand for"
    if isinstance(kernel, FirstOrder):
        proposed = kernel.prior > 0
        proposed[kernel.target_ids] = True  # a token of T∩D keeps some probability, whatever its prior
        return [(reached, f"{int(proposed.sum()):,} of {pair.target.size:,}")]
    assert isinstance(kernel, Matrix)
    rows = np.diff(kernel.starts)
    own = np.repeat(pair.to_target_ids(kernel.drafter_ids), rows) == kernel.target_ids
    outside = ~np.isin(kernel.target_ids, pair.to_target_ids(kernel.drafter_ids))
    return [
        (reached, f"{len(np.unique(kernel.target_ids)):,} of {pair.target.size:,}"),
        ("entries", f"{len(kernel.weights):,}"),
        ("draft tokens that stand for themselves only", f"{int(((rows == 1) & (_sums(own, kernel) > 0)).sum()):,}"),
        ("probability that a token keeps, mean", f"{_sums(own, kernel).mean():.1%}"),
        ("probability that goes to tokens the drafter lacks, mean", f"{_sums(outside, kernel).mean():.1%}"),
    ]


def _sums(chosen: NDArray[np.bool_], kernel: Matrix) -> Probabilities:
    """The total weight of the chosen entries of each row."""
    return np.add.reduceat(np.where(chosen, kernel.weights, 0.0), kernel.starts[:-1])


def _aligned(job: Job) -> tuple[Kernel, str]:
    found = Alignment(job.pair, job.target.tokenization, job.drafter.tokenization)
    size = 0
    for text in job.texts():
        found.add(text)
        size += len(text)
    if found.left_out == size:
        raise ValueError(
            "one of the tokenizers changes text, so that no line of the corpus is the same for both; use --kind prefix"
        )
    note = f"; left out {found.left_out:,} that a tokenizer changes" if found.left_out else ""
    return _kept(found.matrix(job.neighbours), job), f"from {size:,} characters{note}"


def _prefix(job: Job) -> tuple[Kernel, str]:
    counted = job.frequencies()
    matrix = first_pieces(job.pair, job.drafter.tokenization, counted.counts, job.neighbours)
    return _kept(matrix, job), f"from {counted.tokens:,} target tokens"


def _co_occurrence(job: Job) -> tuple[Kernel, str]:
    length, temperature = job.options.window or WINDOW, job.options.temperature or TEMPERATURE
    windows = Windows(job.target.tokenization, length)
    for text in job.texts():
        windows.add(text)
    note = f"; {windows.forgotten:,} occurrences of rare pairs not counted" if windows.forgotten else ""
    matrix = co_occurrence(job.pair, windows, temperature, job.neighbours)
    return _kept(matrix, job), f"τ = {temperature:g}, windows of {length} target tokens{note}"


def _first_order(job: Job) -> tuple[Kernel, str]:
    counted = job.frequencies()
    return FirstOrder.of(job.pair, counted.counts.astype(np.float64)), f"prior from {counted.tokens:,} target tokens"


def _kept(matrix: Matrix, job: Job) -> Matrix:
    return matrix.keeping(job.pair, job.options.keep) if job.options.keep else matrix


BUILDERS: dict[Kinds, Callable[[Job], tuple[Kernel, str]]] = {
    Kinds.ALIGNED: _aligned,
    Kinds.PREFIX: _prefix,
    Kinds.CO_OCCURRENCE: _co_occurrence,
    Kinds.FIRST_ORDER: _first_order,
}
TAKES: dict[Kinds, tuple[str, ...]] = {
    Kinds.ALIGNED: ("neighbours", "keep"),
    Kinds.PREFIX: ("neighbours", "keep"),
    Kinds.CO_OCCURRENCE: ("neighbours", "keep", "window", "temperature"),
    Kinds.FIRST_ORDER: (),
}


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
