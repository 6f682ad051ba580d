"""The training corpus: the sources of Python's own standard library.

A fixed share of the files, chosen by a hash of their paths, is held out: no
tokenizer and no model sees them; prompts and bits per byte come from them.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SEED = 20251120  # of everything that training and the choice of prompts draw
HELD_OUT_PER_CENT = 6
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "encodings", "__pycache__"})
SMALLEST_FILE = 200  # bytes
LARGEST_FILE = 400_000  # bytes; above it there are only generated tables


@dataclass(frozen=True)
class Document:
    """One source file, or a text that the target wrote."""

    name: str  # of a file: its path relative to the standard library, with forward slashes
    text: str
    prompt: int = 0  # characters at the beginning that are no output of the target


@dataclass(frozen=True)
class Corpus:
    """The documents to learn from and the ones to judge by."""

    training: tuple[Document, ...]
    held_out: tuple[Document, ...]


def is_held_out(name: str) -> bool:
    """Whether a file is kept out of training: a pure function of its path."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PER_CENT


@cache
def read_corpus() -> Corpus:
    """Every Python source of this interpreter's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = [document for path in sorted(root.rglob("*.py")) if (document := _read(root, path))]
    training = tuple(document for document in documents if not is_held_out(document.name))
    held_out = tuple(document for document in documents if is_held_out(document.name))
    return Corpus(training, held_out)


def _read(root: Path, path: Path) -> Document | None:
    relative = path.relative_to(root)
    if SKIPPED_FOLDERS & set(relative.parts):
        return None
    raw = path.read_bytes()
    if not SMALLEST_FILE <= len(raw) <= LARGEST_FILE:
        return None
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None  # a few old sources declare another encoding
    return Document(relative.as_posix(), text.replace("\r\n", "\n"))
