"""`python -m crossdraft.training.prompts OUT`: fifty prompts from the held-out files of the corpus.

Every held-out file that is long enough gives one prompt; further ones come from the largest files, by size, spread
over the file. A prompt begins at the start of a line and has 120 to 1,200 characters, about a wished length that
changes by turns. By turns it ends where a line ends, or in mid-line where a writer might pause: after `def `,
`class `, `import `, `return `, an opening parenthesis or an equals sign; where there is no such place, the other kind
is taken. It may reach the end of its file, after which a model should end its output at once.

The choice is a pure function of the files, so it repeats with the same Python release. The fifty that tests and
benchmarks use are kept as text in `tests/prompts.jsonl`; nothing is picked when they run.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from crossdraft.training.corpus import SEED, Document, read_corpus

COUNT = 50
SHORTEST, LONGEST = 120, 1200  # characters
LENGTHS = (120, 240, 380, 560, 800, 1150)  # characters wished for, by turns
LINE_START = re.compile(r"^(?=.*\S)", re.MULTILINE)
LINE_END = re.compile(r"(?<=\n)")
MID_LINE = re.compile(r"(?<=\bdef )|(?<=\bclass )|(?<=\bimport )|(?<=\breturn )|(?<=\()|(?<= =)")


@dataclass(frozen=True)
class Prompt:
    """The beginning of a text that a model is to go on with."""

    file: str  # path relative to the standard library
    text: str


def pick_prompts(documents: Sequence[Document], count: int = COUNT) -> tuple[Prompt, ...]:
    """`count` prompts, in the order of the documents.

    Raises:
        ValueError: no document holds a prompt.
    """
    rng = np.random.default_rng([SEED, 2])
    usable = [document for document in documents if _starts(document.text)]
    if not usable:
        raise ValueError(f"no document has a line with {SHORTEST} characters from its start on")
    prompts: list[Prompt] = []
    for document, times in zip(usable, _shares(usable, count), strict=True):
        for start in _spread(_starts(document.text), times, rng):
            prompts.append(Prompt(document.name, _cut(document.text[start:], len(prompts))))
    return tuple(prompts)


def _shares(documents: Sequence[Document], count: int) -> list[int]:
    """How many prompts each document gives: one, then whichever has the most characters for each one that it gives."""
    shares = [1] * min(len(documents), count) + [0] * (len(documents) - count)
    while sum(shares) < count:
        sizes = [len(document.text) / share for document, share in zip(documents, shares, strict=True)]
        shares[int(np.argmax(sizes))] += 1
    return shares


def _starts(text: str) -> list[int]:
    """Where a prompt may begin: lines that are not blank, with room for the shortest prompt."""
    return [match.start() for match in LINE_START.finditer(text) if match.start() + SHORTEST <= len(text)]


def _spread(starts: Sequence[int], times: int, rng: np.random.Generator) -> list[int]:
    """One of the starts from each of `times` equal stretches of them."""
    stretches = np.array_split(np.array(starts), times)
    return [int(rng.choice(stretch)) for stretch in stretches if len(stretch)]


def _cut(text: str, number: int) -> str:
    """The beginning of `text` that is the prompt of this number."""
    wished = LENGTHS[number % len(LENGTHS)]
    kinds = (LINE_END, MID_LINE) if number // len(LENGTHS) % 2 == 0 else (MID_LINE, LINE_END)
    for kind in kinds:
        ends = [match.start() for match in kind.finditer(text) if SHORTEST <= match.start() <= LONGEST]
        if ends:
            return text[: min(ends, key=lambda end: abs(end - wished))]
    return text[:wished]


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """The prompts of a file of JSON lines, each with a `text` and, if it is known, the `file` that it is from.

    Raises:
        ValueError: a line is not such an object, or there is none.
        OSError: the file cannot be read.
    """
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    if not lines:
        raise ValueError(f'{path} has no prompts; write lines such as {{"text": "def main("}}')
    return tuple(_read(line, f"{path}, prompt {number}") for number, line in enumerate(lines, 1))


def _read(line: str, place: str) -> Prompt:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error}") from error
    text = found.get("text") if isinstance(found, dict) else None
    if not isinstance(text, str) or not text:
        raise ValueError(f'{place}: it needs a "text" that is not empty')
    return Prompt(str(found.get("file", "")), text)


def main(out: Annotated[Path, typer.Argument(help="the JSON lines file to write")]) -> None:
    """Pick the prompts and write them, one JSON object (file, text) a line."""
    lines = [json.dumps(asdict(prompt)) + "\n" for prompt in pick_prompts(read_corpus().held_out)]
    out.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
