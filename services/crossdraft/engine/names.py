"""What a model's name means: a folder, a hub id or a bundled model. Without torch: some only want the tokenizer."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

INFLATED_PREFIX = "inflated:"
BUNDLED = Path(__file__).parent / "bundled"
BUNDLED_PREFIX = "bundled:"
RANDOM_PREFIX = "random:"  # and an architecture: a small random model of the laboratory's, with the tokenizer of BYTES
BYTES = "drafter-c"
LABORATORY = "crossdraft.lab"


class ModelLoadError(ValueError):
    """A model cannot be loaded; the text says what to change."""


class WrongOptionError(ModelLoadError):
    """An option has a value that cannot be used with this model or machine."""


class NumberOutOfRangeError(WrongOptionError):
    """A number that was asked for does not fit this model or machine."""


def check_laboratory(what: str) -> None:
    """Raises ModelLoadError if the laboratory, which `what` needs, is not installed: wheels have none."""
    if find_spec(LABORATORY) is None:
        raise ModelLoadError(
            f"{what} is of the laboratory, which is not installed: it is in a checkout of crossdraft, after "
            "pip install -c constraints.txt -e '.[serve]' there"
        )


def laboratory(module: str, what: str) -> Any:
    """A module of the laboratory, which the product does not import. `what` is the one who needs it. Raises
    ModelLoadError: it is not installed."""
    check_laboratory(what)
    return import_module(f"{LABORATORY}.{module}")


def check_name(name: str) -> None:
    """Raises ModelLoadError: there is no such model here or on the hub, or no laboratory, which makes such models."""
    from crossdraft.text.tokenizer_file import TokenizerMissing, files_of  # the hub's client, which takes long

    if name.startswith((INFLATED_PREFIX, RANDOM_PREFIX)):
        check_laboratory(name)
    try:
        files_of(source_of(name))("config.json")
    except TokenizerMissing as error:
        raise ModelLoadError(str(error)) from error


def source_of(name: str) -> str:
    """The folder or hub id that a name means; of a model that is inflated, that of the original. Raises ModelLoadError:
    there is no such bundled model or folder."""
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
