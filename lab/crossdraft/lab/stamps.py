"""Tables in pages that `crossdraft bench seeds` writes, and what each was measured with.

A table stands between two lines of its page, `<!-- bench seeds NAME: STAMP -->` and `<!-- end -->`. The stamp has the
day, and a digest of the weights and tokenizer of each model, such as `drafter-b 0123abcd`, or of the file of a real
vocabulary. `python -m crossdraft.lab.stamps` fails if a bundled model has other ones now, or `make vocabularies` makes
another file.
"""

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from runpy import run_path

from crossdraft.engine.names import BUNDLED

PAGES, VOCABULARIES = Path("docs"), Path(".ci/vocabularies.py")  # of a checkout
TABLE = re.compile(r"<!-- bench seeds ([\w-]+): (.*?) -->\n(.*?)<!-- end -->", re.DOTALL)


@cache
def digest_of(model: str | Path) -> str:
    """Of a bundled model's weights and tokenizer, or of a file; OSError if there is none."""
    folder = BUNDLED / model
    paths = [model] if isinstance(model, Path) else [*sorted(folder.glob("*.safetensors")), folder / "tokenizer.json"]
    contents = b"".join(path.read_bytes() for path in paths)
    return hashlib.sha256(contents).hexdigest()[:8]


def write(page: Path, name: str, day: str, models: Iterable[str | Path], text: str) -> None:
    """Writes a table into its place on a page, with a stamp of bundled models and of files; ValueError if there is no
    such place."""
    stamp = ", ".join([day, *(f"{Path(model).stem} {digest_of(model)}" for model in models)])
    before = page.read_text(encoding="utf-8")
    found = next((place for place in TABLE.finditer(before) if place[1] == name), None)
    if found is None:
        raise ValueError(f"{page} has no place for the table {name}")
    made = f"<!-- bench seeds {name}: {stamp} -->\n\n{text}\n\n<!-- end -->"
    page.write_text(before[: found.start()] + made + before[found.end() :], encoding="utf-8")


def outdated(pages: Path = PAGES) -> Iterator[str]:
    """What is wrong with the stamps of a folder's pages, a line each."""
    now = {path.name: digest_of(path.name) for path in BUNDLED.iterdir() if path.is_dir()}
    now |= run_path(str(VOCABULARIES))["DIGESTS"]
    for path in sorted(pages.glob("*.md")):
        for name, stamp, _ in TABLE.findall(path.read_text(encoding="utf-8")):
            for model, digest in (part.split(" ", 1) for part in stamp.split(", ")[1:]):
                if digest != now.get(model):
                    yield f"{path}: {name} was measured with {model} {digest}, which is {now.get(model)} now"


if __name__ == "__main__":
    faults = list(outdated())
    print("\n".join([*faults, "make them again: crossdraft bench seeds --only NAME"]) if faults else "stamps: current")
    sys.exit(bool(faults))
