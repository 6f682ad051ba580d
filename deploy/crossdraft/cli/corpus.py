"""`crossdraft affinity` and `crossdraft frequencies`: files made from a corpus. They read tokenizers, no weights.

A corpus is a stream of texts, read in chunks with a progress bar on stderr.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from itertools import accumulate
from pathlib import Path
from typing import TextIO

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from crossdraft.cli.running import CommandFailed, PlainConsole, UsageError, check_output, interruptible
from crossdraft.config.commands import AffinityOptions
from crossdraft.engine.names import ModelLoadError, source_of
from crossdraft.text.affinity import Affinity, Alignment, Matrix, Windows, co_occurrence, save_affinity
from crossdraft.text.frequencies import TokenFrequencies, count_frequencies
from crossdraft.text.letters import Side
from crossdraft.text.pairs import Pair
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.tokenizer_file import TokenizerMissing, load_tokenizer_json

NEIGHBOURS = 64  # target tokens, at most, that the probability of a draft token is spread over
WINDOW = 8  # target tokens in which two co-occur
TEMPERATURE = 1e-4  # τ of Eq. 2: covariances are of this size
DIVISORS = (32, 16, 8, 4, 2)  # of the vocabulary's size: rows of the summary of `frequencies`
CHUNK = 1 << 18  # characters that are read at once
MAX_LINE = 1 << 26  # characters of a line of a .jsonl file
NAMED = 2  # skipped files whose names are printed, at most


def make_affinity(target: str, drafter: str, corpus: Path, output: Path, options: AffinityOptions) -> None:
    """Estimates the matrix, writes the file and prints what is in it."""
    for name in ("window", "temperature"):
        if getattr(options, name) is not None and options.kind == "aligned":
            raise UsageError(f"--{name} is not an option of --kind {options.kind}: leave it out")
    check_output(output)
    ours, theirs = NamedTokenizer.load(target, Side.TARGET), NamedTokenizer.load(drafter, Side.DRAFTER)
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


def summary(affinity: Affinity, pair: Pair) -> Table:
    """What a matrix does with the probability of a draft token."""
    table, matrix = Table(show_header=False), affinity.matrix
    reached = f"{len(np.unique(matrix.target_ids)):,} of {pair.target.size:,}"
    table.add_row("draft tokens that the target has", f"{len(matrix.drafter_ids):,}")
    table.add_row("target tokens that a draft token can stand for", reached)
    table.add_row("entries", f"{len(matrix.weights):,}")
    return table


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
    """Counts the tokens of a corpus, writes the file, and prints which share of them a pruned head would keep."""
    check_output(output)
    texts = corpus_texts(corpus, "counting")
    named = NamedTokenizer.load(model, Side.DRAFTER)
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


def corpus_texts(path: Path, doing: str, chunk: int = CHUNK) -> Iterator[str]:
    """The text of a file, or of all files in a folder and below it, by path, hidden ones left out.

    It comes in parts of `chunk` characters and the rest of their last line, or as much of it again.

    A line of a `.jsonl` file is an object whose `text` is a part of its own. Any other file is text itself; what is not
    UTF-8 or may not be read is skipped to its end, and counted in a note on stderr. `doing` labels the progress bar.
    """
    try:
        found = [path] if path.is_file() else sorted(_files(path))
        sizes = {file: file.stat().st_size for file in found}
        there = bool(sizes) or path.is_dir()
    except OSError as error:
        raise UsageError(f"the corpus {path} cannot be read: {error.strerror}") from error
    if not there:
        raise UsageError(f"there is no corpus {path}: give a file of text or JSON lines, or a folder of such files")
    if not sizes:
        raise UsageError(f"the corpus {path} has no files: give a file, or a folder with text in it")
    return _texts(path, sizes, doing, chunk)


def _texts(path: Path, sizes: Mapping[Path, int], doing: str, chunk: int) -> Iterator[str]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    skipped: list[str] = []
    found = False
    total = sum(sizes.values())
    interruptible()  # the progress bar has hidden the cursor
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(doing, total=total)
        for file, end in zip(sizes, accumulate(sizes.values()), strict=True):
            try:
                with file.open("rb") as raw:
                    counted = progress.wrap_file(raw, total=total, task_id=task)
                    opened = TextIOWrapper(counted, "utf-8-sig", newline="\n")
                    texts = _json_texts(file, opened) if file.suffix == ".jsonl" else _plain_texts(opened, chunk)
                    for text in filter(None, texts):
                        found = True
                        yield text
            except (OSError, UnicodeDecodeError):
                skipped.append(str(file))
            progress.update(task, completed=end)  # also where a file, or its rest, was skipped
    if not found:
        unread = f"{len(skipped)} of {len(sizes)} files are not UTF-8 or may not be read"
        raise UsageError(f"the corpus {path} has no text: {unread if skipped else 'it is empty'}")
    if skipped:
        names = ", ".join(skipped[:NAMED]) + (", …" if len(skipped) > NAMED else "")
        note = f"skipped {len(skipped)} of {len(sizes)} files: not UTF-8, or may not be read ({names})"
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (file for name in names if not name.startswith(".") and (file := Path(place, name)).is_file())


def _plain_texts(opened: TextIO, chunk: int) -> Iterator[str]:
    """Raises UnicodeDecodeError at the first chunk that is not text."""
    while text := opened.read(chunk):
        text += "" if text.endswith("\n") else opened.readline(chunk)
        if (zero := text.find("\0")) >= 0:
            raise UnicodeDecodeError("utf-8", b"\0", zero, zero + 1, "text has no zero byte")
        yield text


def _json_texts(file: Path, opened: TextIO) -> Iterator[str]:
    for number, line in enumerate(iter(partial(opened.readline, MAX_LINE), ""), 1):
        where = f"{file}, line {number}"
        if len(line) == MAX_LINE and not line.endswith("\n"):
            raise UsageError(f"{where} is longer than {MAX_LINE >> 20} MiB: cut its text in parts")
        try:
            record = json.loads(line) if line.strip() else {"text": ""}
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where} is not JSON: {error}") from error
        if not (isinstance(record, dict) and isinstance(record.get("text"), str)):
            raise UsageError(f'{where} is not an object with a "text": write {{"text": "…"}}, or name the file .txt')
        yield record["text"]


@dataclass(frozen=True, eq=False)
class NamedTokenizer:
    """A model's tokenizer, loaded without the weights."""

    tokenizer_json: str  # the whole file
    tokenization: Tokenization

    @staticmethod
    def load(name: str, side: Side) -> "NamedTokenizer":
        """That of a folder, a hub id, a bundled model or a file; raises CommandFailed if it is of no supported kind."""
        try:
            loaded = load_tokenizer_json(name if Path(name).is_file() else source_of(name))
            return NamedTokenizer(loaded.tokenizer_json, loaded.tokenization(side))
        except (ModelLoadError, TokenizerMissing) as error:
            raise CommandFailed(str(error)) from error
        except ValueError as error:
            raise CommandFailed(f"the tokenizer of {name} cannot be used: {error}") from error
