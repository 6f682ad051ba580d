"""A corpus as a stream of texts, read in chunks with a progress bar on stderr; and a model's tokenizer by its name."""

import json
import os
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from crossdraft.console.running import CommandFailed, UsageError
from crossdraft.engine.names import ModelLoadError, source_of
from crossdraft.text.letters import Side
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.tokenizer_file import TokenizerMissing, load_tokenizer_json
from crossdraft.text.vocabulary import Vocabulary

CHUNK = 1 << 18  # bytes that are read at once
LONGEST_LINE = 1 << 26  # bytes of a line of a .jsonl file
NAMED = 2  # skipped files whose names are printed, at most
Advance = Callable[[int], None]  # called with the number of bytes read


@dataclass(frozen=True)
class Corpus:
    """Files to read, in the order of their paths."""

    path: Path  # as it was given
    files: tuple[Path, ...]
    sizes: tuple[int, ...]  # bytes of each


def find_corpus(path: Path) -> Corpus:
    """The file at `path`, or all files in that folder and below it, hidden ones left out.

    Raises:
        UsageError: there is nothing at `path`, no file in it, or it may not be looked into.
    """
    try:
        return _found(path)
    except OSError as error:
        raise UsageError(f"the corpus {path} cannot be read: {error.strerror}") from error


def _found(path: Path) -> Corpus:
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(_files(path))
        if not files:
            raise UsageError(f"the corpus {path} has no files: give a file, or a folder with text in it")
    else:
        raise UsageError(f"there is no corpus {path}: give a file of text or JSON lines, or a folder of such files")
    return Corpus(path, tuple(files), tuple(file.stat().st_size for file in files))


def corpus_texts(path: Path, doing: str, chunk: int = CHUNK) -> Iterator[str]:
    """The text of a corpus in parts of about `chunk` bytes, which end where a line does if lines are not longer.

    A line of a `.jsonl` file is an object whose `text` is a part of its own. Any other file is text itself; what is not
    UTF-8 or may not be read is skipped from there to the end of the file, and a note on stderr counts these files.

    Args:
        path: a file or a folder.
        doing: label of the progress bar.
        chunk: bytes.

    Raises:
        UsageError: there is no corpus at `path` (raised before anything is read), or it has no text, or a line of JSON
            has none.
    """
    return _texts(find_corpus(path), doing, chunk)


def _texts(corpus: Corpus, doing: str, chunk: int) -> Iterator[str]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    skipped: list[str] = []
    found = False
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(doing, total=sum(corpus.sizes))
        for file, end in zip(corpus.files, accumulate(corpus.sizes), strict=True):
            try:
                for text in _file_texts(file, chunk, lambda count: progress.advance(task, count)):
                    found = True
                    yield text
            except (OSError, UnicodeDecodeError):
                skipped.append(str(file))
            progress.update(task, completed=end)  # also where a file, or its rest, was skipped
    if not found:
        raise UsageError(
            f"the corpus {corpus.path} has no text: "
            + (
                f"{len(skipped)} of {len(corpus.files)} files are not UTF-8 or may not be read"
                if skipped
                else "it is empty"
            )
        )
    if skipped:
        names = ", ".join(skipped[:NAMED]) + (", …" if len(skipped) > NAMED else "")
        note = f"skipped {len(skipped)} of {len(corpus.files)} files: not UTF-8, or may not be read ({names})"
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (file for name in names if not name.startswith(".") and (file := Path(place, name)).is_file())


def _file_texts(file: Path, chunk: int, advance: Advance) -> Iterator[str]:
    with file.open("rb") as opened:
        read = _json_texts(file, opened, advance) if file.suffix == ".jsonl" else _plain_texts(opened, chunk, advance)
        yield from filter(None, read)


def _plain_texts(opened: BinaryIO, chunk: int, advance: Advance) -> Iterator[str]:
    """Raises UnicodeDecodeError at the first chunk that is not text."""
    decoder = getincrementaldecoder("utf-8-sig")()
    rest = ""  # the beginning of a line that is not complete
    while block := opened.read(chunk):
        if b"\0" in block:
            raise UnicodeDecodeError(
                "utf-8", block, block.index(b"\0"), block.index(b"\0") + 1, "text has no zero byte"
            )
        text = rest + decoder.decode(block)
        cut = text.rfind("\n") + 1 or (len(text) if len(text) >= chunk else 0)
        yield text[:cut]
        rest = text[cut:]
        advance(len(block))
    yield rest + decoder.decode(b"", final=True)


def _json_texts(file: Path, opened: BinaryIO, advance: Advance) -> Iterator[str]:
    number = 0
    while line := opened.readline(LONGEST_LINE):
        number += 1
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            raise UsageError(f"{file}, line {number} is longer than {LONGEST_LINE >> 20} MiB: cut its text in parts")
        if line.strip():
            yield _text_of(line, f"{file}, line {number}")
        advance(len(line))


def _text_of(line: bytes, where: str) -> str:
    try:
        record = json.loads(line.decode())
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UsageError(f'{where} is not an object with a "text": write {{"text": "…"}}, or name the file .txt')
    return text


@dataclass(frozen=True, eq=False)
class Named:
    """A model's tokenizer, loaded without the weights."""

    name: str  # a folder, a hub id or a bundled model
    tokenizer_json: str  # the whole file
    tokenization: Tokenization

    @staticmethod
    def load(name: str, side: Side) -> "Named":
        """Raises CommandFailed if there is none, or it is of no supported kind."""
        try:
            loaded = load_tokenizer_json(source_of(name))
            vocabulary = Vocabulary.build(
                loaded.tokenizer_json, loaded.vocabulary_size, loaded.controls, loaded.stops, side
            )
            return Named(name, loaded.tokenizer_json, Tokenization(loaded.tokenizer_json, vocabulary))
        except (ModelLoadError, TokenizerMissing) as error:
            raise CommandFailed(str(error)) from error
        except ValueError as error:
            raise CommandFailed(f"the tokenizer of {name} cannot be used: {error}") from error
