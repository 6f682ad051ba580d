"""A corpus as a stream of texts, read in chunks with a progress bar on stderr; and a model's tokenizer by its name."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import accumulate
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from crossdraft.console.running import CommandFailed, UsageError
from crossdraft.engine.names import ModelLoadError, source_of
from crossdraft.text.letters import Side
from crossdraft.text.tokenization import Tokenization
from crossdraft.text.tokenizer_file import TokenizerMissing, load_tokenizer_json

CHUNK = 1 << 18  # characters that are read at once
LONGEST_LINE = 1 << 26  # characters of a line of a .jsonl file
NAMED = 2  # skipped files whose names are printed, at most


@dataclass(frozen=True)
class CorpusFiles:
    """Files to read, in the order of their paths."""

    path: Path  # as it was given
    files: tuple[Path, ...]
    sizes: tuple[int, ...]  # bytes of each


def find_corpus(path: Path) -> CorpusFiles:
    """The file at `path`, or all files in that folder and below it, hidden ones left out.

    Raises:
        UsageError: there is nothing at `path`, no file in it, or it may not be looked into.
    """
    try:
        files = (path,) if path.is_file() else tuple(sorted(_files(path)))
        if not files and not path.is_dir():
            raise UsageError(f"there is no corpus {path}: give a file of text or JSON lines, or a folder of such files")
        if not files:
            raise UsageError(f"the corpus {path} has no files: give a file, or a folder with text in it")
        return CorpusFiles(path, files, tuple(file.stat().st_size for file in files))
    except OSError as error:
        raise UsageError(f"the corpus {path} cannot be read: {error.strerror}") from error


def corpus_texts(path: Path, doing: str, chunk: int = CHUNK) -> Iterator[str]:
    """The text of a corpus in parts of `chunk` characters and the rest of their last line, or as much of it again.

    A line of a `.jsonl` file is an object whose `text` is a part of its own. Any other file is text itself; what is not
    UTF-8 or may not be read is skipped from about there to its end, and a note on stderr counts these files.

    Args:
        path: a file or a folder.
        doing: label of the progress bar.
        chunk: characters.

    Raises:
        UsageError: there is no corpus at `path` (raised before anything is read), or it has no text, or a line of JSON
            has none.
    """
    return _texts(find_corpus(path), doing, chunk)


def _texts(corpus: CorpusFiles, doing: str, chunk: int) -> Iterator[str]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    skipped: list[str] = []
    found = False
    total = sum(corpus.sizes)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(doing, total=total)
        for file, end in zip(corpus.files, accumulate(corpus.sizes), strict=True):
            try:
                with file.open("rb") as raw:
                    counted = progress.wrap_file(raw, total=total, task_id=task)
                    for text in _file_texts(file, TextIOWrapper(counted, "utf-8-sig", newline="\n"), chunk):
                        found = True
                        yield text
            except (OSError, UnicodeDecodeError):
                skipped.append(str(file))
            progress.update(task, completed=end)  # also where a file, or its rest, was skipped
    if not found:
        unread = f"{len(skipped)} of {len(corpus.files)} files are not UTF-8 or may not be read"
        raise UsageError(f"the corpus {corpus.path} has no text: {unread if skipped else 'it is empty'}")
    if skipped:
        names = ", ".join(skipped[:NAMED]) + (", …" if len(skipped) > NAMED else "")
        note = f"skipped {len(skipped)} of {len(corpus.files)} files: not UTF-8, or may not be read ({names})"
        console.print(note, markup=False, highlight=False, soft_wrap=True)


def _files(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (file for name in names if not name.startswith(".") and (file := Path(place, name)).is_file())


def _file_texts(file: Path, opened: TextIO, chunk: int) -> Iterator[str]:
    return filter(None, _json_texts(file, opened) if file.suffix == ".jsonl" else _plain_texts(opened, chunk))


def _plain_texts(opened: TextIO, chunk: int) -> Iterator[str]:
    """Raises UnicodeDecodeError at the first chunk that is not text."""
    while text := opened.read(chunk):
        text += "" if text.endswith("\n") else opened.readline(chunk)
        if (zero := text.find("\0")) >= 0:
            raise UnicodeDecodeError("utf-8", b"\0", zero, zero + 1, "text has no zero byte")
        yield text


def _json_texts(file: Path, opened: TextIO) -> Iterator[str]:
    number = 0
    while line := opened.readline(LONGEST_LINE):
        number += 1
        if len(line) == LONGEST_LINE and not line.endswith("\n"):
            raise UsageError(f"{file}, line {number} is longer than {LONGEST_LINE >> 20} MiB: cut its text in parts")
        if line.strip():
            yield _text_of(line, f"{file}, line {number}")


def _text_of(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is not JSON: {error}") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise UsageError(f'{where} is not an object with a "text": write {{"text": "…"}}, or name the file .txt')
    return text


@dataclass(frozen=True, eq=False)
class Named:
    """A model's tokenizer, loaded without the weights."""

    tokenizer_json: str  # the whole file
    tokenization: Tokenization

    @staticmethod
    def load(name: str, side: Side) -> "Named":
        """That of a folder, a hub id or a bundled model; raises CommandFailed if it has none of a supported kind."""
        try:
            loaded = load_tokenizer_json(source_of(name))
            return Named(loaded.tokenizer_json, loaded.tokenization(side))
        except (ModelLoadError, TokenizerMissing) as error:
            raise CommandFailed(str(error)) from error
        except ValueError as error:
            raise CommandFailed(f"the tokenizer of {name} cannot be used: {error}") from error
