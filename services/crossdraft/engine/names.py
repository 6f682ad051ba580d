"""What a model's name means: a folder, a hub id or a bundled model. Without torch: some only want the tokenizer."""

import re
from dataclasses import dataclass
from pathlib import Path

INFLATED_PREFIX = "inflated:"
SIZES = re.compile(r"(\d+)x(\d+)(?:x(\d+))?(?:\+(\d+))?")
BUNDLED = Path(__file__).parent / "bundled"
BUNDLED_PREFIX = "bundled:"
RANDOM_PREFIX = "random:"  # and an architecture: a small random model, with the tokenizer of BYTES
BYTES = "drafter-c"


class ModelLoadError(ValueError):
    """A model cannot be loaded; the text says what to change."""


class NumberOutOfRangeError(ModelLoadError):
    """A number that was asked for does not fit this model or machine."""


@dataclass(frozen=True)
class Size:
    """The larger shape of a model that is inflated."""

    layers: int
    hidden: int  # width of the residual stream; the heads' width stays, and there are more of them
    intermediate: int | None = None  # width of the MLP; None: grows as `hidden` does
    vocabulary: int | None = None  # ids, of which those beyond the model's own are never drawn; None: the model's own


def size_of(name: str) -> Size | None:
    """What the model of a name is inflated to when it is loaded; None: it is not.

    Raises:
        ModelLoadError: the shape is none.
    """
    if not name.startswith(INFLATED_PREFIX):
        return None
    numbers = SIZES.fullmatch(name.removeprefix(INFLATED_PREFIX).partition(":")[0])
    if numbers is None:
        raise ModelLoadError(f"{name}: give {INFLATED_PREFIX}LAYERSxHIDDEN[xINTERMEDIATE][+VOCABULARY]:NAME")
    layers, hidden, *others = numbers.groups()
    return Size(int(layers), int(hidden), *(None if one is None else int(one) for one in others))


def source_of(name: str) -> str:
    """The folder or hub id that a name means; of a model that is inflated, that of the original.

    Raises:
        ModelLoadError: there is no such bundled model or folder.
    """
    if name.startswith(INFLATED_PREFIX):
        return source_of(name.removeprefix(INFLATED_PREFIX).partition(":")[2])
    if name.startswith(RANDOM_PREFIX):
        return str(BUNDLED / BYTES)
    if name.startswith(BUNDLED_PREFIX):
        folder = BUNDLED / name.removeprefix(BUNDLED_PREFIX)
        if not (folder / "config.json").is_file():
            raise ModelLoadError(
                f"there is no bundled model {name!r}: there are {', '.join(bundled_names()) or 'none'}"
            )
        return str(folder)
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_local and not Path(name).is_dir():
        raise ModelLoadError(f"there is no folder {name}: give a folder, a hub id or {BUNDLED_PREFIX}<name>")
    return name


def bundled_names() -> list[str]:
    return sorted(BUNDLED_PREFIX + path.parent.name for path in BUNDLED.glob("*/config.json"))
